"""An agent process between a coordinator, a launcher and ranks: start, welcome, hold, save, end."""

from __future__ import annotations

import dataclasses
import pathlib

from lastwords.protocol import control, snapshots, wire
from lastwords.protocol.control import Word
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import ExitReport, LiveCopy, RankState, RestoreSource, RunState, StackReport
from lastwords.protocol.pieces import Topology
from lastwords.storage.checkpoints import JobCheckpoints
from tests.processes.agent.harness import FakeRank, Launcher, running, until

ONE = Topology(workers=1, processes_per_worker=2)
TWO = Topology(workers=2, processes_per_worker=2)


async def test_ranks_are_run_welcomed_saved_and_ended(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, TWO) as world:
        world.arguments = []
        await world.run_attempt(1)
        welcome = world.ranks[3].of(wire.Welcome)[0]
        assert (welcome.attempt, welcome.restore.source) == (1, RestoreSource.BEGINNING)
        assert welcome.store_address == "127.0.0.1:40001"
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for rank in world.ranks.values():
            rank.send(wire.LayoutReady(generation=1))
            rank.boundary(1)
            rank.snapshot(1, 0)
        for worker in (0, 1):
            report = await world.coordinator.wait(worker, lambda r: r.storage.checkpoints, "a checkpoint")
            assert [info.id for info in report.storage.checkpoints] == [CheckpointId(step=1, attempt=1)]
            assert report.table is not None
            assert report.layout_attempt == 1
            assert [(part.rank, part.step) for part in report.parts] == [(2 * worker, 1), (2 * worker + 1, 1)]
            assert {r.state for r in report.ranks} == {RankState.RUNNING}
        for rank in world.ranks.values():
            assert (await rank.wait(wire.Persisted)).error == ""
        job = JobCheckpoints.at(str(world.storage), "ns", "job")
        assert job.verify(CheckpointId(step=1, attempt=1)) == []
        await until(lambda: not any(world.volumes[0].pins()), "nothing is pinned any more")

        for rank in world.ranks.values():
            rank.boundary(2)
            rank.snapshot(2, 1, kind="final")
            rank.send(wire.Finished(step=2))
            rank.send(wire.ScriptEnded(exit=None))
        for rank in world.ranks.values():
            await rank.wait(wire.MayExit)
        assert job.verify(CheckpointId(step=2, attempt=1)) == []
        for worker, launcher in world.launchers.items():
            for rank in TWO.ranks_of(worker):
                world.ranks[rank].close()
                launcher.died(rank, code=0)
            report = await world.coordinator.wait(worker, lambda r: r.run is RunState.STOPPED, "no rank any more")
            assert {r.state for r in report.ranks} == {RankState.FINISHED}
            assert report.self_hold == 0
        await world.order_all(1, RunState.ENDED)
        for worker in (0, 1):
            assert await until(lambda w=worker: world.agents[w].poll() is not None, "the agent ends")
            assert world.agents[worker].returncode == 0


async def test_O_41_a_save_whose_other_worker_never_writes_is_not_published_and_training_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    async with running(tmp_path, TWO) as world:
        await world.run_attempt(1)
        for worker in (0, 1):
            world.volumes[worker].write_layout()
        for number in (0, 1):
            world.ranks[number].boundary(1)
            world.ranks[number].snapshot(1, 0)
        await world.coordinator.wait(0, lambda r: r.storage.persisting, "the save has begun")
        for rank in world.ranks.values():
            rank.boundary(2)
        report = await world.coordinator.wait(0, lambda r: all(k.step == 2 for k in r.ranks), "steps go on")
        assert report.storage.checkpoints == ()
        assert JobCheckpoints.at(str(world.storage), "ns", "job").list_checkpoints() == []


async def test_a_dead_rank_makes_the_worker_hold_itself_until_an_order_says_it_is_over(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.ranks[0].close()
        hold = await world.ranks[1].wait(wire.Hold)
        report = await world.coordinator.wait(0, lambda r: r.self_hold == 1 and r.ranks[1].held, "held")
        assert not report.ranks[0].held
        world.launchers[0].died(0, log_tail="Killed")
        report = await world.coordinator.wait(0, lambda r: r.ranks[0].state is RankState.EXITED, "it is dead")
        assert report.ranks[0].exit is not None
        assert (report.ranks[0].exit.signal, report.ranks[0].exit.traceback) == (9, "Killed")
        assert report.self_hold == 1, "one death is one hold"
        await world.order_all(1, store_address="127.0.0.1:40001", release_hold=1)
        assert (await world.ranks[1].wait(wire.Release)).hold == hold.hold


async def test_an_exception_holds_the_others_and_is_reported(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        told = ExitReport(exception="ValueError", message="no", traceback="Traceback…", step=3)
        world.ranks[0].send(wire.ScriptEnded(exit=told))
        await world.ranks[1].wait(wire.Hold)
        report = await world.coordinator.wait(0, lambda r: r.ranks[0].state is RankState.ERRORED, "errored")
        assert report.ranks[0].exit == told
        assert world.ranks[0].of(wire.MayExit) == []
        await world.order_all(1, RunState.STOPPED)
        assert (await world.launchers[0].wait(wire.StopRanks)).attempt == 1
        await world.coordinator.wait(0, lambda r: r.run is RunState.STOPPED, "stopped")
        assert world.launchers[0].of(wire.StopRanks) == [wire.StopRanks(attempt=1)]


async def test_hold_by_order_release_to_live_copy_and_stacks(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        state, values = world.volumes[0], {"store_address": "127.0.0.1:40001"}
        state.write_layout()
        for rank in world.ranks.values():
            rank.boundary(4)
            rank.snapshot(4, 1, persist=False)
            control.put(rank.block, Word.FLOOR_STEP, 5)
            rank.boundary(5)
        await world.order_all(1, hold=True, release_to=6, **values)
        assert (await world.ranks[0].wait(wire.Hold)).release_to == 6
        world.ranks[0].send(wire.HoldState(hold=world.ranks[0].hold, step=5, odd=False, at_gate=True))

        copy = LiveCopy(number=7, step=5, writers={0: 1, 1: 1})
        await world.order_all(1, hold=True, live_copy=copy, stacks=1, **values)
        order = await world.ranks[1].wait(wire.CopyLive)
        assert order == wire.CopyLive(number=7, step=5, parts={0: 0, 1: 0}), "not the slot of the floor"
        for part in (0, 1):
            state.write_part(0, part, 5, 1)
        world.ranks[1].send(wire.LiveCopyDone(number=7, step=5))
        report = await world.coordinator.wait(0, lambda r: 7 in r.copied, "copied")
        assert report.copy_errors == ()
        assert {(p.rank, p.slot, p.step) for p in report.parts} == {(0, 0, 5), (1, 0, 5), (0, 1, 4), (1, 1, 4)}

        await world.ranks[1].wait(wire.DumpStacks)
        stack = StackReport(responsive=True, in_collective=True, text="all_reduce")
        world.ranks[1].send(wire.Stacks(number=1, stack=stack))
        report = await world.coordinator.wait(0, lambda r: all(k.stack for k in r.ranks), "stacks of all")
        assert report.ranks[1].stack is not None
        assert report.ranks[1].stack.in_collective
        assert report.ranks[0].stack is not None
        assert not report.ranks[0].stack.responsive
        assert report.ranks[0].stack.process_state in ("R", "S")


async def test_old_orders_and_unreadable_frames_are_refused(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(2)
        for text in ("{", "[1]", '{"kind":"order"}', '{"kind":"order","epoch":"x"}'):
            await world.coordinator.send(0, text)
        await world.coordinator.order(0, world.make_order(1, epoch=9))
        await world.coordinator.order(0, world.make_order(2, RunState.STOPPED, number=1))
        await world.coordinator.order(0, world.make_order(2, store_address="x:1", epoch=2, number=77))
        report = await world.coordinator.wait(0, lambda r: r.order_seen == 77, "the good one is taken")
        assert report.epoch_seen == 2
        assert len(world.coordinator.hellos) == 1, "the connection was never ended"
        assert world.launchers[0].of(wire.StopRanks) == []


async def test_new_plans_are_handed_on_and_unknown_lines_skipped(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.ranks[0].raw(b'{"kind":"Nonsense"}\nnot json\n')
        plan = snapshots.SnapshotPlan(number=2, every_steps=5, from_step=40)
        await world.order_all(1, store_address="127.0.0.1:40001", plan=plan)
        assert (await world.ranks[0].wait(wire.NewPlan)).plan == plan
        assert world.coordinator.reports[0].self_hold == 0


async def test_an_attempt_is_never_started_by_a_second_launcher(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        for rank in world.ranks.values():
            rank.close()
        world.launchers[0].close()
        report = await world.coordinator.wait(0, lambda r: not r.launcher, "the launcher is gone")
        report = await world.coordinator.wait(
            0, lambda r: all(k.state is RankState.EXITED for k in r.ranks), "its ranks too"
        )
        assert all(k.exit is not None and k.exit.signal == 9 for k in report.ranks)
        second = Launcher(world.volumes[0].folder, pid=6000)
        world.launchers[0] = second
        await second.begin()
        report = await world.coordinator.wait(0, lambda r: r.launcher, "the second launcher")
        assert report.run is RunState.STOPPED
        assert report.attempt == 1
        assert second.of(wire.RunRanks) == []
        await world.order_all(2)
        assert (await second.wait(wire.RunRanks)).attempt == 2


async def test_a_rank_of_an_older_attempt_is_not_served(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(2)
        old = FakeRank(world.volumes[0], 1, 1)
        await old.begin()
        old.send(wire.ScriptEnded(exit=ExitReport(exception="X")))
        control.initialise(old.block, rank=1, attempt=2, pid=1)
        world.ranks[1].boundary(1)
        report = await world.coordinator.wait(0, lambda r: r.ranks[1].step == 1, "the newer one is heard")
        old.close()
        assert report.self_hold == 0
        assert old.of(wire.Welcome) == []


async def test_a_launcher_that_cannot_run_the_command_is_reported(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        world.launchers[0].close()
        world.launchers[0] = Launcher(world.volumes[0].folder)
        await world.launchers[0].begin(error="no such file: trian.py")
        report = await world.coordinator.wait(0, lambda r: r.launcher_error, "told")
        assert report.launcher_error == "no such file: trian.py"
        await world.order_all(1)
        await world.coordinator.wait(0, lambda r: r.order_seen == world.numbers, "the order is seen")
        assert world.launchers[0].of(wire.RunRanks) == []
        world.launchers[0].send(wire.StopRequested(reason="SIGTERM"))
        await world.coordinator.wait(0, lambda r: r.stop_requested == "SIGTERM", "told")


async def test_non_finite_state_is_not_saved_and_the_user_is_told(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, ONE) as world:
        await world.run_attempt(1)
        world.volumes[0].write_layout()
        for rank in world.ranks.values():
            rank.boundary(1)
            rank.snapshot(1, 0, finite=rank.rank != 1)
        report = await world.coordinator.wait(0, lambda r: r.notices, "a notice")
        assert report.notices[0].code == "non-finite"
        assert report.storage == dataclasses.replace(report.storage, checkpoints=(), failures_in_row=0)
