"""Snapshots that another worker keeps too."""

from __future__ import annotations

import pathlib

import pytest

from lastwords.protocol import snapshots, volume, wire
from lastwords.protocol.messages import RestorePlan, RestoreSource
from lastwords.protocol.pieces import Topology
from tests.processes.agent.harness import World, record_bytes, running, until

TWO = Topology(workers=2, processes_per_worker=2)
BIG = 20_000_000


async def snapshot_all(world: World, step: int, slot: int) -> None:
    """All ranks pass `step`, snapshot it, and hear that it is kept elsewhere."""
    for volume_ in world.volumes:
        volume_.write_layout()
    for rank in world.ranks.values():
        rank.boundary(step)
        rank.snapshot(step, slot, persist=False)
    for rank in world.ranks.values():
        await until(lambda r=rank: any(m.step == step for m in r.of(wire.Replicated)), "it has a replica")


@pytest.mark.slow
async def test_every_part_and_its_record_stand_on_the_next_worker_too(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO, nbytes=BIG) as world:
        await world.run_attempt(1, replicas=1)
        for step, slot in ((1, 0), (2, 1), (3, 0)):
            await snapshot_all(world, step, slot)
        for rank, peer in world.ranks.items():
            assert [m.error for m in peer.of(wire.Replicated)] == ["", "", ""]
            keeper = world.volumes[1 - rank // 2]
            for step, slot in ((3, 0), (2, 1)):
                assert (keeper.folder / volume.part(slot, rank)).read_bytes() == keeper.part_bytes(rank, step, 1)
        report = await world.coordinator.wait(1, lambda r: len(r.parts) == 8, "own parts and replicas")
        assert {(p.rank, p.step) for p in report.parts} == {(rank, step) for rank in range(4) for step in (2, 3)}
        assert {(r.rank, r.step) for r in report.records} >= {(0, 3), (1, 3)}


@pytest.mark.slow
async def test_a_new_worker_gets_its_parts_and_records_from_replicas(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1, replicas=1)
        await snapshot_all(world, 4, 0)
        for rank in (0, 1):
            for path in world.volumes[0].folder.glob(f"*{rank:05d}*"):
                path.unlink()
        plan = RestorePlan(
            source=RestoreSource.MEMORY, step=4, attempt=1, parts=dict.fromkeys(range(4), 1),
            records=dict.fromkeys(range(4), 1),
        )  # fmt: skip
        await world.run_attempt(2, restore=plan, replicas=1)
        for rank in (0, 1):
            restore = world.ranks[rank].of(wire.Welcome)[0].restore
            path = pathlib.Path(restore.files[0].path)
            assert path.parent == world.volumes[0].folder
            assert path.read_bytes() == world.volumes[0].part_bytes(rank, 4, 1)
            assert restore.files[0].blocks == snapshots.block_checksums(path.read_bytes())
            assert restore.record is not None
            assert pathlib.Path(restore.record.path).read_bytes() == record_bytes(rank, 4, 1)


async def test_a_replica_that_cannot_be_made_is_said_and_blocks_nothing(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1, replicas=1)
        world.kill_agent(1)
        for volume_ in world.volumes:
            volume_.write_layout()
        rank = world.ranks[0]
        rank.boundary(1)
        rank.snapshot(1, 0, persist=False)
        await until(lambda: rank.of(wire.Replicated), "it is answered")
        assert "worker 1 does not answer" in rank.of(wire.Replicated)[0].error
        report = await world.coordinator.wait(0, lambda r: r.notices, "the user hears of it")
        assert [notice.code for notice in report.notices] == ["no-replica"]


async def test_without_replicas_nothing_is_sent(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        assert world.ranks[0].of(wire.Welcome)[0].replicas == 0
        world.volumes[0].write_layout()
        world.ranks[0].boundary(1)
        world.ranks[0].snapshot(1, 0, persist=False)
        await world.coordinator.wait(0, lambda r: any(p.step == 1 for p in r.parts), "the part is reported")
        assert world.ranks[0].of(wire.Replicated) == []
        assert not (world.volumes[1].folder / volume.part(0, 0)).exists()
