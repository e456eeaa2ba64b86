"""Restore plans: from this worker's memory, from another's, from a checkpoint; damage; new workers; agents that die."""

from __future__ import annotations

import asyncio
import pathlib
import shutil

import aiohttp
import pytest

from lastwords.agent import volume as agent_volume
from lastwords.protocol import snapshots, volume, wire
from lastwords.protocol.manifest import CheckpointId, part_data
from lastwords.protocol.messages import RestorePlan, RestoreSource, RunState
from lastwords.protocol.pieces import Topology
from lastwords.storage.checkpoints import JobCheckpoints
from tests.processes.agent.harness import World, record_bytes, running, until

ONE = Topology(workers=1, processes_per_worker=2)
TWO = Topology(workers=2, processes_per_worker=2)
BIG = 20_000_000


def fill(world: World, workers: tuple[int, ...] = (0, 1), step: int = 6, slot: int = 0) -> None:
    """Parts and records of a step of attempt 1 on these workers."""
    for worker in workers:
        world.volumes[worker].write_layout()
        for rank in world.topology.ranks_of(worker):
            world.volumes[worker].write_part(slot, rank, step, 1)
            world.volumes[worker].write_record(rank, step, 1)


def from_memory(
    step: int = 6, parts: dict[int, int] | None = None, records: dict[int, int] | None = None
) -> RestorePlan:
    here = {0: 0, 1: 0, 2: 1, 3: 1}
    return RestorePlan(
        source=RestoreSource.MEMORY, step=step, attempt=1, parts=parts or here,
        records=here if records is None else records,
    )  # fmt: skip


async def test_what_is_in_memory_already_is_named_and_checked(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO, fill) as world:
        await world.run_attempt(2, restore=from_memory())
        for rank, peer in world.ranks.items():
            restore = peer.of(wire.Welcome)[0].restore
            state = world.volumes[rank // 2]
            assert (restore.source, restore.step, restore.attempt) == (RestoreSource.MEMORY, 6, 1)
            assert pathlib.Path(restore.files[0].path).name == volume.part(0, rank)
            for file in restore.files:
                data = pathlib.Path(file.path).read_bytes()
                assert (len(data), snapshots.block_checksums(data)) == (file.nbytes, file.blocks)
            assert restore.chunks_path == str(state.folder / volume.LAYOUT)
            assert restore.record is not None
            assert pathlib.Path(restore.record.path).read_bytes() == record_bytes(rank, 6, 1)
            assert restore.shared_record is None


@pytest.mark.slow
async def test_a_worker_without_memory_gets_everything_from_its_neighbour(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        fill(world, (0,))
        world.volumes[0].write_record(1, 6, 1, provisional=True)

    async with running(tmp_path, TWO, prepare, nbytes=BIG) as world:
        plan = from_memory(parts={0: 0, 1: 0, 2: 0, 3: 0}, records={0: 0, 1: 0})
        await world.run_attempt(2, restore=plan)
        for rank in (2, 3):
            restore = world.ranks[rank].of(wire.Welcome)[0].restore
            path = pathlib.Path(restore.files[0].path)
            assert path.parent == world.volumes[1].folder
            assert path.read_bytes() == world.volumes[1].part_bytes(rank, 6, 1)
            assert restore.files[0].blocks == snapshots.block_checksums(path.read_bytes())
            assert restore.record is None, "reseeded"
            assert restore.shared_record is not None
            assert pathlib.Path(restore.shared_record.path).read_bytes() == record_bytes(0, 6, 1)
        report = await world.coordinator.wait(1, lambda r: r.parts, "the parts are in its inventory")
        assert {(p.rank, p.step, p.attempt) for p in report.parts} == {(2, 6, 1), (3, 6, 1)}
        assert report.table is not None


async def test_a_fetched_part_goes_into_the_slot_that_is_worth_least(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        fill(world, (0,))
        fill(world, (1,), step=5, slot=0)
        fill(world, (1,), step=7, slot=1)

    async with running(tmp_path, TWO, prepare) as world:
        await world.run_attempt(2, restore=from_memory(parts={0: 0, 1: 0, 2: 0, 3: 0}, records={0: 0, 1: 0}))
        report = await world.coordinator.wait(1, lambda r: sum(p.step == 6 for p in r.parts) == 2, "fetched")
        assert {(p.rank, p.slot, p.step) for p in report.parts} == {(2, 0, 5), (3, 0, 5), (2, 1, 6), (3, 1, 6)}


async def test_a_damaged_part_is_refused_and_leaves_the_inventory(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        fill(world)
        path = world.volumes[0].folder / volume.part(0, 1)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    async with running(tmp_path, TWO, prepare) as world:
        await world.order_all(2, restore=from_memory())
        report = await world.coordinator.wait(0, lambda r: r.prepared and not r.prepared.ok, "refused")
        assert report.prepared is not None
        assert "block 0 of the part of rank 1" in report.prepared.error
        report = await world.coordinator.wait(0, lambda r: len(r.parts) == 1, "it is no part any more")
        assert report.parts[0].rank == 0
        report = await world.coordinator.wait(1, lambda r: r.prepared and r.prepared.ok, "the other one is fine")


async def test_a_damaged_part_is_taken_from_the_neighbour_when_the_plan_says_so(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        fill(world)
        (world.volumes[0].folder / volume.part(0, 1)).write_bytes(b"short")

    async with running(tmp_path, TWO, prepare) as world:
        await world.run_attempt(2, restore=from_memory(parts={0: 0, 1: 1, 2: 1, 3: 1}))
        path = pathlib.Path(world.ranks[1].of(wire.Welcome)[0].restore.files[0].path)
        assert path.read_bytes() == world.volumes[0].part_bytes(1, 6, 1)


async def test_a_peer_whose_agent_is_being_restarted_is_waited_for(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO, lambda world: fill(world, (0,))) as world:
        plan = from_memory(parts={0: 0, 1: 0, 2: 0, 3: 0}, records={0: 0, 1: 0})
        world.kill_agent(0)
        old = world.coordinator.reports.pop(0)
        await world.coordinator.order(1, world.make_order(2, restore=plan, peers={0: old.fetch_address}))
        await until(lambda: world.launchers[1].attempt == 2, "its ranks are run")
        await asyncio.sleep(0.3)
        assert world.coordinator.reports[1].prepared is None
        world.start_agent(0)
        new = await world.coordinator.wait(0, lambda r: r.fetch_address, "the agent is back")
        await world.coordinator.order(1, world.make_order(2, restore=plan, peers={0: new.fetch_address}))
        report = await world.coordinator.wait(1, lambda r: r.prepared, "prepared")
        assert report.prepared is not None
        assert report.prepared.ok


async def test_from_a_checkpoint_the_ranks_read_the_storage(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await train_and_save(world)
        await world.order_all(1, RunState.STOPPED)
        await world.coordinator.wait(0, lambda r: r.run is RunState.STOPPED, "stopped")
        plan = RestorePlan(source=RestoreSource.CHECKPOINT, step=1, attempt=1)
        await world.run_attempt(2, restore=plan)
        restore = world.ranks[0].of(wire.Welcome)[0].restore
        assert all(str(world.storage) in file.path for file in restore.files)
        assert restore.chunks_path.endswith("manifest.json")
        assert restore.record is not None
        assert pathlib.Path(restore.record.path).read_bytes() == record_bytes(0, 1, 1)


async def test_O_12_a_damaged_checkpoint_is_refused_once_and_marked_for_all(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await train_and_save(world)
        await world.order_all(1, RunState.STOPPED)
        await world.coordinator.wait(0, lambda r: r.run is RunState.STOPPED, "stopped")
        job = JobCheckpoints.at(str(world.storage), "ns", "job")
        path = pathlib.Path(job.location(CheckpointId(step=1, attempt=1), part_data(0)))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        await world.order_all(2, restore=RestorePlan(source=RestoreSource.CHECKPOINT, step=1, attempt=1))
        report = await world.coordinator.wait(0, lambda r: r.prepared and not r.prepared.ok, "refused")
        assert "damaged" in report.storage.checkpoints[0].rejected
        assert "damaged" in job.list_checkpoints()[0].rejected, "whoever looks next sees it too"


async def train_and_save(world: World, step: int = 1) -> None:
    """Attempt 1 of one worker makes a checkpoint."""
    await world.run_attempt(1)
    world.volumes[0].write_layout()
    for rank in world.ranks.values():
        rank.boundary(step)
        rank.snapshot(step, step % 2)
    await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "a checkpoint")
    for rank in world.ranks.values():
        rank.close()


async def test_records_of_every_boundary_go_to_the_next_worker_and_outlive_its_agent(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for step in (1, 2, 3):
            for rank in world.ranks.values():
                rank.boundary(step)
            for worker in (0, 1):
                others = set(world.topology.ranks_of(1 - worker))
                await world.coordinator.wait(
                    worker,
                    lambda r, s=step, o=others: o <= {x.rank for x in r.records if x.neighbour and x.step == s},
                    f"the other worker's records of step {step}",
                )
        world.kill_agent(1)
        shutil.rmtree(world.volumes[0].folder / agent_volume.NEIGHBOURS)
        del world.coordinator.reports[1]
        world.start_agent(1)
        report = await world.coordinator.wait(1, lambda r: r.records, "the agent is back")
        kept = {(r.rank, r.step) for r in report.records if r.neighbour}
        assert kept == {(0, 2), (0, 3), (1, 2), (1, 3)}


async def test_restored_records_go_to_a_neighbour_that_is_new(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO, lambda world: fill(world, (0,))) as world:
        plan = from_memory(parts={0: 0, 1: 0, 2: 0, 3: 0}, records={0: 0, 1: 0})
        await world.run_attempt(2, restore=plan)
        world.ranks[0].send(wire.Boundary(step=6))
        await until(lambda: len(_kept_of(world, 0)) == 2, "it is kept")
        assert [(r.head.step, r.head.attempt) for r in _kept_of(world, 0)] == [(6, 1), (6, 1)]
        for step in (7, 8):
            world.ranks[0].boundary(step)
        kept = {6, 7, 8}
        await until(lambda: {r.head.step for r in _kept_of(world, 0)} == kept, "what was restored is the floor still")


async def test_the_record_of_a_snapshot_stays_with_the_neighbour_as_long_as_the_snapshot(
    tmp_path: pathlib.Path,
) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        rank = world.ranks[0]
        for step, slot in ((1, 0), (2, 1), (3, None), (4, None), (5, 0), (6, None), (7, None)):
            rank.boundary(step)
            if slot is not None:
                rank.snapshot(step, slot, persist=False)
            await until(lambda s=step: any(r.head.step == s for r in _kept_of(world, 0)), "it is kept")
        wanted = {2, 5, 6, 7}
        await until(
            lambda: {r.head.step for r in _kept_of(world, 0)} == wanted, "those of both slots, and the last two"
        )


async def test_a_rank_hears_when_its_early_record_is_on_another_worker(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        rank = world.ranks[0]
        rank.foretell(1)
        await until(lambda: rank.of(wire.RecordKept) == [wire.RecordKept(step=1)], "it is kept")
        assert [r.head.provisional for r in _kept_of(world, 0)] == [True]
        rank.boundary(1, foretold=True)
        rank.foretell(2)
        await until(lambda: rank.of(wire.RecordKept)[1:] == [wire.RecordKept(step=2)], "the next one is kept")
        assert [r.head.provisional for r in _kept_of(world, 0)] == [True, True], "what says the same is not sent again"
        rank.boundary(2)
        await until(lambda: not all(r.head.provisional for r in _kept_of(world, 0)), "the final record, not foretold")


def _kept_of(world: World, rank: int) -> list[agent_volume.Record]:
    """What the worker 1 keeps of a rank of worker 0."""
    folder = world.volumes[1].folder / agent_volume.NEIGHBOURS
    records = [agent_volume.parse_record(path.read_bytes()) for path in sorted(folder.iterdir())]
    return [record for record in records if record is not None and record.head.rank == rank]


async def test_what_agents_give_to_each_other_needs_the_token_of_the_job(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE, lambda world: fill(world, (0,))) as world:
        address = world.coordinator.reports[0].fetch_address
        good = {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession() as session:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer söcret"}):
                async with session.get(f"http://{address}/v1/layout", headers=headers) as response:
                    assert response.status == 401
            async with session.get(f"http://{address}/v1/parts?step=6&attempt=1", headers=good) as response:
                parts = await response.json()
            assert [part["record"]["rank"] for part in parts] == [0, 1]
            url = f"http://{address}/v1/parts/0/0"
            sequence = parts[0]["sequence"]
            for query, span, status in (
                (f"?sequence={sequence}", "bytes=0-99", 206),
                (f"?sequence={sequence + 2}", "bytes=0-99", 409),
                (f"?sequence={sequence}", "bytes=999999999-", 416),
                (f"?sequence={sequence}", "bytes=9-1", 416),
                ("", "bytes=0-99", 400),
            ):
                async with session.get(url + query, headers={**good, "Range": span}) as response:
                    assert response.status == status, (query, span)
            for path in ("/v1/records/0/99?attempt=1", "/v1/records/9/6?attempt=1"):
                async with session.get(f"http://{address}{path}", headers=good) as response:
                    assert response.status == 404
            async with session.post(f"http://{address}/v1/neighbour/7", data=b"junk", headers=good) as response:
                assert response.status == 400
