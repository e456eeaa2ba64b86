"""Agent, storage or coordinator fail: nothing is half committed, nothing is done twice, training goes on."""

from __future__ import annotations

import asyncio
import os
import pathlib

import pytest

from lastwords.protocol import control, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import PersistOrder, RankState, RestorePlan, RestoreSource, RunState
from lastwords.protocol.pieces import Topology
from lastwords.storage.checkpoints import JobCheckpoints
from tests.processes.agent.harness import FakeRank, Launcher, World, running, until

ONE = Topology(workers=1, processes_per_worker=2)
TWO = Topology(workers=2, processes_per_worker=2)


def checkpoints(world: World) -> JobCheckpoints:
    return JobCheckpoints.at(str(world.storage), "ns", "job")


async def reconnect(world: World, worker: int = 0) -> None:
    """Launcher and ranks find the new agent, as their real links do."""
    old = world.launchers[worker]
    old.close()
    world.launchers[worker] = launcher = Launcher(world.volumes[worker].folder, pid=old.pid)
    launcher.attempt, launcher.alive = old.attempt, old.alive
    await launcher.begin()
    for number in world.topology.ranks_of(worker):
        if launcher.alive[number].alive:
            rank = world.ranks[number]
            rank.close()
            rank.got.clear()
            await rank.begin(resumed=True)


async def test_an_agent_that_was_killed_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(3)
        world.volumes[0].write_layout()
        world.ranks[0].send(wire.LayoutReady(generation=1))
        for rank in world.ranks.values():
            rank.boundary(4)
            rank.snapshot(4, 0, persist=False)
        first = await world.coordinator.wait(0, lambda r: r.layout_attempt == 3 and len(r.parts) == 2, "known")
        world.kill_agent(0)
        del world.coordinator.reports[0]
        # An order of an older attempt must not pass just because the agent is new.
        world.coordinator.orders[0] = world.make_order(2, RunState.STOPPED)
        world.start_agent(0)
        await reconnect(world)
        report = await world.coordinator.wait(
            0, lambda r: r.launcher and {k.state for k in r.ranks} == {RankState.RUNNING}, "all is back"
        )
        assert report.agent_run != first.agent_run
        assert (report.attempt, report.run, report.self_hold) == (3, RunState.RUNNING, 0)
        assert report.layout_attempt == 3
        assert len(report.parts) == 2
        assert report.prepared is not None
        assert report.prepared.ok
        assert world.ranks[0].of(wire.Hold) == []
        runs = world.launchers[0].of(wire.RunRanks)
        assert [run.attempt for run in runs] in ([], [3]), "repeated to the same launcher at most"


async def test_a_rank_that_dies_while_the_agent_is_away_is_noticed(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.kill_agent(0)
        world.ranks[0].close()
        process = world.launchers[0].alive[0]
        world.launchers[0].alive[0] = wire.RankProcess(rank=0, pid=process.pid, alive=False, signal=11)
        del world.coordinator.reports[0]
        world.start_agent(0)
        await reconnect(world)
        await world.ranks[1].wait(wire.Hold)
        report = await world.coordinator.wait(0, lambda r: r.self_hold and r.ranks[1].held, "held")
        assert report.ranks[0].state is RankState.EXITED


async def test_a_hold_outlives_the_agent(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.ranks[0].close()
        hold = (await world.ranks[1].wait(wire.Hold)).hold
        world.kill_agent(0)
        del world.coordinator.reports[0]
        world.start_agent(0)
        await reconnect(world)
        assert (await world.ranks[1].wait(wire.Hold)).hold > hold, "ranks refuse a lower number"
        report = await world.coordinator.wait(0, lambda r: r.self_hold == 1 and r.ranks[1].held, "in force")
        await world.order_all(1, store_address="127.0.0.1:40001", release_hold=1)
        await world.ranks[1].wait(wire.Release)
        assert report.self_hold == 1


async def test_slots_of_ranks_that_train_are_never_prepared_again_by_a_new_agent(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        for worker in (0, 1):
            world.volumes[worker].write_layout()
            for rank in world.topology.ranks_of(worker):
                world.volumes[worker].write_part(0, rank, 6, 1)
                world.volumes[worker].write_record(rank, 6, 1)

    async with running(tmp_path, TWO, prepare) as world:
        here = {0: 0, 1: 0, 2: 1, 3: 1}
        plan = RestorePlan(source=RestoreSource.MEMORY, step=6, attempt=1, parts=here, records=here)
        await world.run_attempt(2, restore=plan)
        for rank in (0, 1):
            world.volumes[0].write_part(0, rank, 8, 2)
            world.volumes[0].write_part(1, rank, 7, 2)
        world.kill_agent(0)
        del world.coordinator.reports[0]
        world.start_agent(0)
        await reconnect(world)
        report = await world.coordinator.wait(0, lambda r: r.prepared and r.launcher, "back")
        assert report.prepared is not None
        assert report.prepared.ok
        assert {(p.slot, p.step) for p in report.parts} == {(0, 8), (1, 7)}


async def test_an_interrupted_save_is_taken_up_by_the_next_agent(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for number in (0, 1):
            world.ranks[number].boundary(1)
            world.ranks[number].snapshot(1, 0)
        await world.coordinator.wait(0, lambda r: r.storage.persisting, "it has begun")
        folder = world.storage / "ns/job" / CheckpointId(step=1, attempt=1).folder
        await until(lambda: (folder / "rank-00001.json").exists(), "its own parts are written")
        world.kill_agent(0)
        world.start_agent(0)
        await reconnect(world)
        for number, rank in world.ranks.items():
            if number > 1:
                rank.boundary(1)
                rank.snapshot(1, 0)
            else:
                rank.send(wire.SnapshotReady(step=1, slot=0, persist=True))
        await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "committed")
        assert checkpoints(world).verify(CheckpointId(step=1, attempt=1)) == []


async def test_another_worker_commits_when_the_first_is_gone(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for number in (0, 1):
            world.ranks[number].boundary(1)
            world.ranks[number].snapshot(1, 0)
        folder = world.storage / "ns/job" / CheckpointId(step=1, attempt=1).folder
        await until(lambda: (folder / "rank-00001.json").exists(), "worker 0 has written")
        world.kill_agent(0)
        for number in (2, 3):
            world.ranks[number].boundary(1)
            world.ranks[number].snapshot(1, 0)
        await world.coordinator.wait(1, lambda r: r.storage.checkpoints, "worker 1 commits")
        assert checkpoints(world).verify(CheckpointId(step=1, attempt=1)) == []


async def test_last_words_go_to_storage_from_the_survivors(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for number in (0, 1):
            world.ranks[number].boundary(3)
            world.volumes[0].write_part(0, number, 3, 1)
        for number in (2, 3):
            world.ranks[number].boundary(3)
        await world.coordinator.wait(
            0, lambda r: {x.rank for x in r.records if x.step == 3} == {0, 1, 2, 3}, "records of both workers"
        )
        world.kill_agent(1)
        del world.coordinator.reports[1]
        await world.order_all(1, RunState.STOPPED)
        persist = PersistOrder(step=3, attempt=1, kind="last-words", parts=(0, 1), record_ranks=(0, 1, 2, 3))
        await world.coordinator.order(0, world.make_order(1, RunState.STOPPED, persist=persist))
        report = await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "kept")
        assert report.storage.checkpoints[0].kind == "last-words"
        assert checkpoints(world).verify(CheckpointId(step=3, attempt=1)) == []


async def test_last_words_finish_a_periodic_save_whose_other_worker_is_lost(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for number in (0, 1):
            world.ranks[number].boundary(3)
            world.ranks[number].snapshot(3, 0)
        for number in (2, 3):
            world.ranks[number].boundary(3)
        await world.coordinator.wait(
            0, lambda r: {x.rank for x in r.records if x.step == 3} == {0, 1, 2, 3}, "records of both workers"
        )
        await world.coordinator.wait(0, lambda r: r.storage.persisting, "the periodic save waits for worker 1")
        world.kill_agent(1)
        del world.coordinator.reports[1]
        persist = PersistOrder(step=3, attempt=1, kind="last-words", parts=(0, 1), record_ranks=(0, 1, 2, 3))
        await world.coordinator.order(0, world.make_order(1, RunState.STOPPED, persist=persist))
        await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "kept")
        assert checkpoints(world).verify(CheckpointId(step=3, attempt=1)) == []


async def test_O_33_a_storage_that_cannot_be_written_is_told_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.volumes[0].write_layout()
        folder = world.storage / "ns/job" / CheckpointId(step=1, attempt=1).folder
        folder.write_text("a file where the folder should be")
        for rank in world.ranks.values():
            rank.boundary(1)
            rank.snapshot(1, 1)
        report = await world.coordinator.wait(0, lambda r: r.storage.failures_in_row == 1, "the failure is told")
        assert folder.name in report.storage.error
        assert (await world.ranks[0].wait(wire.Persisted)).error
        for rank in world.ranks.values():
            rank.boundary(2)
            rank.snapshot(2, 0)
        report = await world.coordinator.wait(0, lambda r: r.storage.checkpoints, "the next step is saved")
        assert (report.storage.failures_in_row, report.storage.error) == (0, "")
        assert [info.id.step for info in report.storage.checkpoints] == [2]


async def test_the_storage_of_another_job_is_refused_with_a_sentence(tmp_path: pathlib.Path) -> None:
    checkpoints_of_another = JobCheckpoints.at(str(tmp_path / "storage"), "ns", "job")
    checkpoints_of_another.claim("somebody else")
    world = World(tmp_path, ONE)
    try:
        await world.coordinator.start()
        world.start_agent(0)
        report = await world.coordinator.wait(0, lambda r: r.notices, "told")
        assert report.notices[0].fatal
        assert "another job of the same name" in report.notices[0].text
        assert not report.storage.loaded
    finally:
        await world.stop()


async def test_retention_keeps_the_last_ones_and_those_in_use(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        in_use = CheckpointId(step=1, attempt=1)
        await world.run_attempt(1, keep_last=2, in_use=(in_use,))
        world.volumes[0].write_layout()
        for step in range(1, 6):
            for rank in world.ranks.values():
                rank.boundary(step)
                rank.snapshot(step, step % 2)
            await world.coordinator.wait(
                0, lambda r, s=step: any(info.id.step == s for info in r.storage.checkpoints), f"step {step} is saved"
            )
        await world.coordinator.wait(0, lambda r: len(r.storage.checkpoints) == 3, "old ones are gone")
        assert [found.step for found in checkpoints(world).list_folders()] == [1, 4, 5]


async def test_while_the_coordinator_is_away_training_and_saves_go_on(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.volumes[0].write_layout()
        await world.coordinator.stop()
        for rank in world.ranks.values():
            rank.boundary(1)
            rank.snapshot(1, 1)
        for rank in world.ranks.values():
            assert (await rank.wait(wire.Persisted)).error == ""
            assert rank.of(wire.Hold) == []
        world.coordinator.reports.clear()
        await world.coordinator.start()
        report = await world.coordinator.wait(0, lambda r: True, "the agent connects again")
        assert [info.id.step for info in report.storage.checkpoints] == [1]


async def test_a_coordinator_that_stays_away_means_last_words_and_a_clean_end(tmp_path: pathlib.Path) -> None:
    def prepare(world: World) -> None:
        world.arguments = ["--coordinator-lost-seconds", "1"]

    async with running(tmp_path, TWO, prepare) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for rank in world.ranks.values():
            rank.boundary(7)
            rank.snapshot(7, 1, persist=False)
            control.put(rank.block, Word.FLOOR_STEP, 8)
        world.kill_agent(1)
        await world.coordinator.stop()
        world.start_agent(1)
        await reconnect(world, 1)
        for rank in world.ranks.values():
            await rank.wait(wire.Hold)
        for worker, launcher in world.launchers.items():
            await launcher.wait(wire.StopRanks)
            for number in world.topology.ranks_of(worker):
                world.ranks[number].close()
            await launcher.wait(wire.EndLauncher)
            await until(lambda w=worker: world.agents[w].poll() is not None, "the agent ends")
            assert world.agents[worker].returncode == 0
        job = checkpoints(world)
        assert [(info.id.step, info.kind) for info in job.list_checkpoints()] == [(7, "last-words")]
        assert job.verify(CheckpointId(step=7, attempt=1)) == []
        await world.coordinator.start()


@pytest.mark.slow
async def test_without_a_coordinator_a_worker_does_not_wait_for_one_that_had_nothing_to_save(
    tmp_path: pathlib.Path,
) -> None:
    """Worker 1 never heard that step 7 was whole, and ends with what is saved already: nothing."""

    def prepare(world: World) -> None:
        world.arguments = ["--coordinator-lost-seconds", "1"]

    async with running(tmp_path, TWO, prepare) as world:
        await world.run_attempt(1)
        world.volumes[0].write_layout()
        for number in world.topology.ranks_of(0):
            rank = world.ranks[number]
            rank.boundary(7)
            rank.snapshot(7, 1, persist=False)
            control.put(rank.block, Word.FLOOR_STEP, 8)
        await world.coordinator.stop()
        for worker in (1, 0):
            launcher = world.launchers[worker]
            await until(lambda one=launcher: one.of(wire.StopRanks), "the ranks are to end", 40)
            for number in world.topology.ranks_of(worker):
                world.ranks[number].close()
            await launcher.wait(wire.EndLauncher)
            await until(lambda w=worker: world.agents[w].poll() is not None, "the agent ends")
        assert checkpoints(world).list_checkpoints() == []
        assert (world.volumes[0].folder / volume.part(1, 0)).exists(), "what could not be saved stays in memory"
        await world.coordinator.start()


async def test_a_second_agent_in_the_same_volume_refuses_to_start(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        first = world.agents[0]
        second = world.start_agent(0)
        try:
            assert await asyncio.to_thread(second.wait, 20) == 1
            assert "another agent serves" in (tmp_path / "agent-0.log").read_text()
            assert first.poll() is None
        finally:
            world.agents[0] = first


async def test_a_wrong_command_line_is_one_sentence(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, ONE)
    os.unlink(tmp_path / "token")
    agent = world.start_agent(0)
    assert await asyncio.to_thread(agent.wait, 20) == 2
    log = (tmp_path / "agent-0.log").read_text()
    assert "the token file cannot be read" in log
    assert "Traceback" not in log


async def test_ranks_of_an_old_attempt_are_stopped_before_the_new_one_is_run(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        await world.order_all(2)
        assert (await world.launchers[0].wait(wire.StopRanks)).attempt == 1
        for number in (0, 1):
            world.ranks[number].close()
        await until(lambda: world.launchers[0].attempt == 2, "then the new one is run")
        kinds = [type(m) for m in world.launchers[0].got if isinstance(m, wire.RunRanks | wire.StopRanks)]
        assert kinds == [wire.RunRanks, wire.StopRanks, wire.RunRanks]
        report = await world.coordinator.wait(0, lambda r: r.attempt == 2, "reported")
        assert report.self_hold == 0
        fresh = FakeRank(world.volumes[0], 0, 2)
        await fresh.begin()
        report = await world.coordinator.wait(0, lambda r: r.store_address.endswith(":40002"), "the new store")
        assert fresh.of(wire.Hold) == []
        fresh.close()


@pytest.mark.slow
async def test_O_36_a_storage_that_stalls_stops_neither_training_nor_the_end_of_the_agent(
    tmp_path: pathlib.Path,
) -> None:
    def prepare(world: World) -> None:
        world.variables = {"LASTWORDS_WINDOWS_LOG": str(tmp_path / "windows")}

    async with running(tmp_path, ONE, prepare) as world:
        await world.run_attempt(1)
        world.volumes[0].write_layout()
        folder = world.storage / "ns/job" / CheckpointId(step=1, attempt=1).folder
        folder.mkdir()
        # Whoever opens it for writing waits for a reader that never comes.
        os.mkfifo(folder / "rank-00000.safetensors")
        for rank in world.ranks.values():
            rank.boundary(1)
            rank.snapshot(1, 1)
        await until(lambda: (folder / "plan.json").exists(), "the save has begun")
        for step in range(2, 12):
            for rank in world.ranks.values():
                rank.boundary(step)
            await world.coordinator.wait(
                0, lambda r, s=step: all(k.step == s for k in r.ranks), f"step {step} is told", 5.0
            )
        storage = world.coordinator.reports[0].storage
        assert storage.persisting == CheckpointId(step=1, attempt=1)
        await world.coordinator.wait(
            0, lambda r: r.storage.persisting_seconds > storage.persisting_seconds > 0, "how long it takes is told"
        )
        lines = [line.split()[2:] for line in (tmp_path / "windows").read_text().splitlines()]
        assert lines[-1] == ["agent", "persist", "begin"]
        for rank in world.ranks.values():
            rank.close()
        await world.order_all(1, RunState.ENDED)
        await until(lambda: world.agents[0].poll() is not None, "the agent ends beside the stuck call")
        assert world.agents[0].returncode == 0
