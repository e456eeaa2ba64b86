"""A checkpoint needs one step of all workers: worker 0 chooses which, however fast each of them is."""

from __future__ import annotations

import pathlib

import pytest

from lastwords.protocol.pieces import Topology
from lastwords.storage.checkpoints import JobCheckpoints
from tests.processes.agent.harness import World, running

pytestmark = pytest.mark.slow

TWO = Topology(workers=2, processes_per_worker=1)


def snapshot(world: World, rank: int, step: int) -> None:
    world.ranks[rank].boundary(step)
    world.ranks[rank].snapshot(step, step % 2)


async def test_a_worker_that_is_free_earlier_waits_for_the_step_that_the_others_save(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for volume in world.volumes:
            volume.write_layout()
        snapshot(world, 1, 1)
        seen = await world.coordinator.wait(1, lambda r: len(r.parts) == 1, "the first snapshot of worker 1")
        await world.coordinator.wait(1, lambda r: r is not seen, "a report after it, and time to begin a save")
        snapshot(world, 1, 2)
        await world.coordinator.wait(1, lambda r: len(r.parts) == 2, "both snapshots of worker 1")
        job = JobCheckpoints.at(str(world.storage), "ns", "job")
        assert job.list_folders() == [], "worker 1 begins nothing by itself"
        snapshot(world, 0, 2)
        for worker in (0, 1):
            await world.coordinator.wait(worker, lambda r: r.storage.checkpoints, "a checkpoint")
        assert [folder.step for folder in job.list_folders()] == [2]
        # A worker whose agent was started anew hears of the next one too.
        world.kill_agent(1)
        del world.coordinator.reports[1]
        world.start_agent(1)
        await world.coordinator.wait(1, lambda r: r.storage.loaded, "the agent is back")
        await world.order_all(1, store_address=world.coordinator.orders[0].store_address)
        world.ranks[1].close()
        await world.ranks[1].begin(resumed=True)
        for rank in (0, 1):
            snapshot(world, rank, 3)
        await world.coordinator.wait(0, lambda r: len(r.storage.checkpoints) == 2, "the next checkpoint")
