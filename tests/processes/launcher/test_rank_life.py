"""A rank's process: its death, its ends, and what is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import pytest

from lastwords.launcher import leftovers
from lastwords.protocol import control, environment, volume, wire
from lastwords.protocol.control import Word
from tests.processes.launcher.fake_agent import FakeAgent, Launched, end, order, until, worker

pytestmark = pytest.mark.slow  # each starts interpreters with torch

SLEEP = """
import os, subprocess, sys, time
# A child in the rank's group, one in a group of its own, and a daemon whose parent has gone.
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], process_group=0)
subprocess.run(["sh", "-c", "setsid sleep 1000 &"])
print("sleeping", flush=True)
time.sleep(1000)
"""


def _sleeping(launched: Launched, agent: FakeAgent, attempt: int, count: int) -> dict[int, int]:
    pids = agent.running(attempt, count)
    for rank in range(count):
        until(lambda rank=rank: "sleeping" in launched.log(rank, attempt), f"rank {rank} sleeps")
    return pids


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_rank_is_told_with_its_signal_within_milliseconds(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = _sleeping(launched, agent, 1, 2)
        until(lambda: len(_of_ranks(launched)) == 8, "all their children run", 5)
        group = [pid for pid in _of_ranks(launched) if pid != pids[1] and _group(pid) == pids[1]]
        assert len(group) == 1
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        dead = agent.dead(1, 1)
        took = time.monotonic() - began
        assert (dead.signal, dead.code, dead.pid) == (signal.SIGKILL, None, pids[1])
        assert "sleeping" in dead.log_tail
        assert took < 0.5  # the kernel takes the process apart first; typically 20 to 40 ms
        until(lambda: not _alive(group[0]), "its process group is killed", 5)
        assert _alive(pids[0])


def test_stop_ends_whole_groups_and_what_escaped_from_them(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = _sleeping(launched, agent, 1, 2)
        before = until(lambda: len(found := _of_ranks(launched)) == 8 and found, "all their children run", 5)
        os.kill(pids[0], signal.SIGSTOP)  # a stopped rank dies as well
        agent.launcher.send(wire.StopRanks(attempt=1))
        agent.processes(lambda r: all(not p.alive for p in r.processes), "all ranks are dead")
        until(lambda: not any(_alive(pid) for pid in before), "nothing of the ranks is left", 5)
        # Not started again, as the order is a repeat.
        agent.launcher.send(order(1, 2))
        agent.launcher.send(order(2, 1))
        agent.running(2, 1)
        assert not any(_alive(pid) for pid in pids.values())


def test_a_grace_lets_a_rank_end_by_itself_and_is_cut_short_by_a_stop_without(tmp_path: pathlib.Path) -> None:
    script = """
import os, signal, sys, time
def leave(*_):
    print("asked to end", flush=True)
    if os.environ["RANK"] == "0":
        sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("sleeping", flush=True)
while True:
    time.sleep(0.05)
"""
    with worker(tmp_path, script, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        _sleeping(launched, agent, 1, 2)
        agent.launcher.send(wire.StopRanks(attempt=1, grace_seconds=500.0))
        assert agent.dead(0, 1).code == 5
        until(lambda: "asked to end" in launched.log(1, 1), "rank 1 was asked")
        assert agent.launcher.of(wire.Processes)[-1].processes[1].alive
        agent.launcher.send(wire.StopRanks(attempt=1, grace_seconds=0.0))
        assert agent.dead(1, 1).signal == signal.SIGKILL


def test_o22_a_new_attempt_first_kills_whatever_is_left_of_older_ones(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        old = _sleeping(launched, agent, 1, 2)
        before = _of_ranks(launched)
        os.kill(old[1], signal.SIGKILL)
        agent.launcher.send(order(2, 2))
        new = _sleeping(launched, agent, 2, 2)
        assert not any(_alive(pid) for pid in {*old.values(), *before})
        # An order that comes late, of an older attempt, does nothing.
        agent.launcher.send(order(1, 2))
        reports = len(agent.launcher.of(wire.Processes))
        until(lambda: len(agent.launcher.of(wire.Processes)) > reports, "the late order is answered")
        assert agent.launcher.of(wire.Processes)[-1].attempt == 2
        assert all(_alive(pid) for pid in new.values())


def test_when_the_launcher_is_killed_ranks_and_their_children_die(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        _sleeping(launched, agent, 1, 2)
        until(lambda: len(_of_ranks(launched)) == 8, "all their children run", 5)
        launched.kill()
        until(lambda: not launched.left(), "all its processes die without anybody's help", 5)


def test_a_new_launcher_kills_what_an_earlier_one_left(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=1) as (launched, agent):
        agent.launcher.send(order(1, 1))
        _sleeping(launched, agent, 1, 1)
        # The guard that would clean up is killed first.
        for pid in _guards(launched):
            os.kill(pid, signal.SIGKILL)
        launched.kill()
        orphans = launched.left()
        assert orphans
        again = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={})
        try:
            until(lambda: len([p for p in agent.peers if p.of(wire.LauncherHello)]) == 2, "it says hello")
            assert not any(_alive(pid) for pid in orphans)
            first = until(lambda: agent.launcher.of(wire.Processes), "it says what runs")[0]
            assert first == wire.Processes(attempt=0, processes=())
            assert "killing processes that were left over" in until(lambda: again.output, "it says so")
        finally:
            end(again, agent)


def test_the_launcher_goes_on_without_its_agent_and_tells_the_next_one_everything(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(3, 2))
        pids = _sleeping(launched, agent, 3, 2)
        agent.close()
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: not pathlib.Path(f"/proc/{pids[1]}").exists(), "rank 1 is dead and reaped", 5)
        second = FakeAgent(launched.volume)
        try:
            report = second.processes(lambda r: r.attempt == 3, "the new agent is told")
            assert [(p.rank, p.alive, p.signal) for p in report.processes] == [(0, True, None), (1, False, 9)]
            assert second.rank(0, 3).of(wire.RankHello)[0].resumed
            second.launcher.send(wire.EndLauncher())
            assert launched.process.wait(10) == 0
        finally:
            second.close()


def test_sigterm_is_passed_on_and_a_second_one_ends_everything(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=1) as (launched, agent):
        agent.launcher.send(order(1, 1))
        pids = _sleeping(launched, agent, 1, 1)
        launched.process.send_signal(signal.SIGTERM)
        assert until(lambda: agent.launcher.of(wire.StopRequested), "the agent is told")[0].reason == "SIGTERM"
        assert _alive(pids[0])
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(10) == 143
        assert not launched.left()


WAITS = "import lastwords.launcher.launcher as launcher; launcher._AGENT_AWAY_SECONDS = launcher._ORPHAN_SECONDS = 1.0"


def test_after_sigterm_it_does_not_wait_for_ever_for_an_agent(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(SLEEP)
    launched = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={}, patch=WAITS)
    agent = FakeAgent(launched.volume)
    try:
        agent.launcher.send(order(1, 1))
        _sleeping(launched, agent, 1, 1)
        agent.close()
        time.sleep(2.0)
        assert launched.process.poll() is None  # without a signal it waits: training goes on
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(10) == 143
        assert not launched.left()
    finally:
        end(launched, agent)


PARENT = """
import os, pathlib, time
if os.fork():
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    os._exit(0)
"""


def test_without_parent_and_agent_it_ends(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(SLEEP)
    launched = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={}, patch=WAITS + PARENT)
    agent = FakeAgent(launched.volume)
    pid = agent.launcher.of(wire.LauncherHello)[0].pid
    try:
        assert pid != launched.process.pid
        agent.launcher.send(order(1, 1))
        _sleeping(launched, agent, 1, 1)
        (tmp_path / "go").touch()
        launched.process.wait(5)
        time.sleep(2.0)
        assert _alive(pid)  # the agent may still end it well
        agent.close()
        until(lambda: not _alive(pid), "it ends by itself", 15)
        assert not launched.left()
    finally:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)
        end(launched, agent)


def test_end_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        _sleeping(launched, agent, 1, 2)
        guards = _guards(launched)
        assert len(guards) == 1
        agent.launcher.send(wire.EndLauncher())
        assert launched.process.wait(15) == 0
        assert not launched.left() and not _alive(guards[0])


def test_a_command_that_cannot_run_is_told_with_a_sentence(tmp_path: pathlib.Path) -> None:
    launched = Launched(tmp_path, [sys.executable, "missing.py"], procs=1, variables={})
    agent = FakeAgent(launched.volume)
    try:
        assert "There is no file 'missing.py'" in agent.launcher.of(wire.LauncherHello)[0].error
        agent.launcher.send(order(1, 1))
        until(lambda: len(agent.launcher.of(wire.Processes)) >= 2, "the order is answered")
        agent.launcher.send(wire.EndLauncher())
        assert launched.process.wait(10) == 0
    finally:
        end(launched, agent)


def test_standbys_are_made_after_the_first_step_and_replaced_when_they_die(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=1) as (launched, agent):
        agent.processes(lambda r: r.standbys == 1, "a standby is ready before anything runs")
        (standby,) = _standbys(launched, set())
        agent.launcher.send(order(1, 1))
        assert _sleeping(launched, agent, 1, 1) == {0: standby}
        assert agent.launcher.of(wire.Processes)[-1].standbys == 0
        time.sleep(0.5)
        assert _standbys(launched, {standby}) == set()  # none while the rank starts
        file = os.open(launched.volume / volume.control(0), os.O_RDWR)
        os.pwrite(file, (1).to_bytes(8, sys.byteorder), Word.FIRST_STEP_NS * 8)
        os.close(file)
        assert control.is_valid(memoryview((launched.volume / volume.control(0)).read_bytes()))
        (new,) = until(lambda: _standbys(launched, {standby}), "a new one is made", 5)
        agent.processes(lambda r: r.standbys == 1, "it is ready")
        assert os.getpriority(os.PRIO_PROCESS, new) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(new, signal.SIGKILL)
        agent.processes(lambda r: r.standbys == 0, "its death is seen")
        agent.processes(lambda r: r.standbys == 1, "another one is made")
        assert "training is not affected" in launched.output
        assert [p.alive for p in agent.launcher.of(wire.Processes)[-1].processes] == [True]


def test_a_standby_that_dies_while_it_becomes_a_rank_is_no_fault(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=1) as (launched, agent):
        agent.processes(lambda r: r.standbys == 1, "a standby is ready")
        (standby,) = _standbys(launched, set())
        os.kill(standby, signal.SIGSTOP)  # it does not hear its line
        agent.launcher.send(order(1, 1))
        agent.processes(lambda r: [p.pid for p in r.processes] == [standby], "it is told to be rank 0")
        os.kill(standby, signal.SIGKILL)
        pids = _sleeping(launched, agent, 1, 1)
        assert pids[0] != standby
        assert all(p.alive for report in agent.launcher.of(wire.Processes) for p in report.processes)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_a_variable_that_is_read_at_load_takes_effect(tmp_path: pathlib.Path, variable: str) -> None:
    script = "import os, sys, torch; print('got', torch.get_num_threads(), hash('a'), flush=True)"
    with worker(tmp_path, script, procs=1) as (launched, agent):
        agent.processes(lambda r: r.standbys == 1, "a standby is ready")
        outputs = []
        for attempt in (1, 2):
            agent.launcher.send(order(attempt, 1, **{variable: "2", "PYTHONHASHSEED": "3"}))
            assert agent.ended(0, attempt).exit is None
            agent.dead(0, attempt)
            outputs.append(launched.log(0, attempt))
        assert outputs[0] == outputs[1] and outputs[0].startswith("got ")
        if variable == "OMP_NUM_THREADS":
            assert outputs[0].startswith("got 2 ")


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _of_ranks(launched: Launched) -> list[int]:
    """What is there because of ranks."""
    return [pid for pid in launched.left() if pid != launched.zygote()]


def _standbys(launched: Launched, others: set[int]) -> set[int]:
    return set(launched.waiting()) - others


def _guards(launched: Launched) -> list[int]:
    """Processes of the launcher's session that carry its environment but not the mark of a rank."""
    return [
        pid
        for pid in leftovers.find([f"{environment.PROCESSES_PER_WORKER}="])
        if b"leftovers.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        and os.getsid(pid) == launched.process.pid
    ]
