"""A real agent whose checkpoints are in an object store: what ranks are given to restore from, and what is refused."""

from __future__ import annotations

import asyncio
import pathlib
import zlib

import pytest

from lastwords.protocol import manifest, wire
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import RestorePlan, RestoreSource, RunState
from lastwords.protocol.pieces import Topology
from lastwords.protocol.snapshots import BLOCK_BYTES
from lastwords.storage import base
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.trainer import reading, served
from tests.processes.agent.harness import World, record_bytes, running
from tests.processes.storage import s3

pytestmark = pytest.mark.slow

ONE = Topology(workers=1, processes_per_worker=2)
CHECKPOINT = CheckpointId(step=1, attempt=1)
PLAN = RestorePlan(source=RestoreSource.CHECKPOINT, step=1, attempt=1)
LARGE = 60_000_000


async def train_and_save(world: World, place: str) -> JobCheckpoints:
    """Attempt 1 makes a checkpoint."""
    await world.run_attempt(1)
    world.volumes[0].write_layout()
    for rank in world.ranks.values():
        rank.boundary(1)
        rank.snapshot(1, 1)
    await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "a checkpoint")
    for rank in world.ranks.values():
        rank.close()
    await world.order_all(1, RunState.STOPPED)
    await world.coordinator.wait(0, lambda r: r.run is RunState.STOPPED, "stopped")
    return JobCheckpoints.at(place, "ns", "job")


async def test_ranks_get_the_blocks_that_they_ask_for_even_if_the_agent_dies_meanwhile(
    tmp_path: pathlib.Path, server: s3.Server
) -> None:
    place = server.prefix()

    def prepare(world: World) -> None:
        world.storage = place  # type: ignore[assignment]

    async with running(tmp_path, ONE, prepare, nbytes=LARGE) as world:
        job = await train_and_save(world, place)
        await world.run_attempt(2, restore=PLAN)
        found = job.read_manifest(CHECKPOINT)
        assert found is not None
        for rank in world.ranks.values():
            restore = rank.of(wire.Welcome)[0].restore
            assert manifest.decode_manifest(pathlib.Path(restore.chunks_path).read_bytes()) == found
            assert restore.record is not None
            assert pathlib.Path(restore.record.path).read_bytes() == record_bytes(rank.rank, 1, 1)
            assert len(restore.files) == 2
            assert {len(sources) for sources in reading.find_sources(restore.files, found.plan.chunks).values()} == {1}
        for file in restore.files:
            assert pathlib.Path(file.path).stat().st_blocks * 512 < 100_000, "only the header is here"
            body = base.read(job.store, file.served)
            assert body is not None
            numbers = [n for n in range(len(file.blocks)) if n != 1]
            assert len(numbers) > 1
            got = served.blocks(file, numbers)
            number, view = await asyncio.to_thread(next, got)
            assert (number, zlib.crc32(view)) == (0, file.blocks[0])
            world.kill_agent(0)
            world.start_agent(0)
            for expected in numbers[1:]:
                number, view = await asyncio.to_thread(next, got)
                assert number == expected
                assert view == body[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        other = wire.RestoreFile(path=file.path, blocks=(), nbytes=1, served="ns/another-job/step/file")
        with pytest.raises(served.ServedError, match="none of this job's files"):
            await asyncio.to_thread(list, served.blocks(other, [0]))


async def test_O_12_a_damaged_checkpoint_is_refused_once_and_marked_for_all(
    tmp_path: pathlib.Path, server: s3.Server
) -> None:
    place = server.prefix()

    def prepare(world: World) -> None:
        world.storage = place  # type: ignore[assignment]

    async with running(tmp_path, ONE, prepare) as world:
        job = await train_and_save(world, place)
        path = job.path(CHECKPOINT, manifest.part_data(0))
        body = base.read(job.store, path)
        assert body is not None
        job.store.write(path, [body[:-1] + bytes([body[-1] ^ 1])], len(body))
        await world.order_all(2, restore=PLAN)
        report = await world.coordinator.wait(0, lambda r: r.prepared and not r.prepared.ok, "refused")
        assert "damaged" in report.storage.checkpoints[0].rejected
        assert "damaged" in job.list_checkpoints()[0].rejected, "whoever looks next sees it too"
