"""The launcher and a command that it runs as it is: its whole tree is ended, and ranks in it are found and watched."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest

from lastwords.protocol import wire
from tests.processes.commands.support import wrapped
from tests.processes.launcher.fake_agent import FakeAgent, Launched, end, order, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SPREAD = """
sleep 1000 &
echo $! >> pids
setsid sleep 1000 &
echo $! >> pids
# Without any mark of ours in its environment, and its parent is gone.
(env -i setsid bash -c 'echo $$ >> pids; trap "" TERM; exec sleep 1000' &)
# A whole tree in another session, of which the top is stopped.
setsid bash -c 'echo $$ >> pids; sleep 1000 & echo $! >> pids; kill -STOP $$' &
echo $$ >> pids
wait
"""


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _pids(launched: Launched, count: int) -> list[int]:
    def look() -> list[int]:
        path = launched.folder / "pids"
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return found if len(found) == count else []

    return until(look, "the command has started everything", 20)


def _log(launched: Launched) -> str:
    return (launched.logs / "worker-0-a1.log").read_text()


@pytest.mark.parametrize("grace_seconds", [0.0, 0.3])
def test_a_stop_ends_all_groups_sessions_and_orphans(tmp_path: pathlib.Path, grace_seconds: float) -> None:
    with wrapped(tmp_path, SPREAD, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = _pids(launched, 6)
        report = agent.processes(lambda r: len(r.processes) == 2, "both ranks are listed")
        assert [(p.rank, p.alive, p.command_alive) for p in report.processes] == [(0, True, True), (1, True, True)]
        assert {p.pid for p in report.processes} <= set(pids)  # the command's own, while no rank is found
        agent.launcher.send(wire.StopRanks(attempt=1, grace_seconds=grace_seconds))
        agent.processes(lambda r: not any(p.alive or p.command_alive for p in r.processes), "the command is dead")
        until(lambda: not any(_alive(pid) for pid in pids), "nothing of it is left", 5)
        # A repeated order does not start it again; a new attempt does.
        agent.launcher.send(order(1, 2))
        (launched.folder / "pids").unlink()
        agent.launcher.send(order(2, 2))
        _pids(launched, 6)


def test_a_new_attempt_and_the_end_of_the_launcher_end_the_old_tree(tmp_path: pathlib.Path) -> None:
    with wrapped(tmp_path, SPREAD, procs=1) as (launched, agent):
        agent.launcher.send(order(1, 1))
        old = _pids(launched, 6)
        (launched.folder / "pids").unlink()
        agent.launcher.send(order(2, 1))
        new = _pids(launched, 6)
        assert not any(_alive(pid) for pid in old)
        agent.launcher.send(wire.EndLauncher())
        assert launched.process.wait(15) == 0
        assert not any(_alive(pid) for pid in new)


def test_it_is_given_torchruns_variables_and_an_address_that_stays_its_own(tmp_path: pathlib.Path) -> None:
    script = """
env | grep -E '^(PET_|RANK|WORLD_SIZE|MASTER_|LASTWORDS_ATTEMPT)'
# Any Python in it finds the library, without the packages of this one.
"$PYTHON" -S -c 'import lastwords; print(f"LIBRARY={lastwords.__file__}")'
echo end
sleep 1000
"""
    with wrapped(tmp_path, script, procs=2) as (launched, agent):
        ports = []
        for attempt in (1, 2):
            agent.launcher.send(order(attempt, 2))
            report = agent.processes(lambda r, attempt=attempt: r.attempt == attempt and r.store_address, "an address")
            path = launched.logs / f"worker-0-a{attempt}.log"
            until(lambda path=path: path.exists() and "end\n" in path.read_text(), "it has shown its variables", 20)
            shown = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
            assert (shown["PET_NNODES"], shown["PET_NPROC_PER_NODE"], shown["PET_NODE_RANK"]) == ("1", "2", "0")
            assert shown["PET_MAX_RESTARTS"] == "0"
            assert "RANK" not in shown
            assert shown["LIBRARY"] == str(launched.volume / "library" / "lastwords" / "__init__.py")
            assert report.store_address == f"127.0.0.1:{shown['PET_MASTER_PORT']}"
            ports.append(shown["PET_MASTER_PORT"])
        assert ports[0] != ports[1]
        assert agent.launcher.of(wire.LauncherHello)[0].wrapped
        assert "wrapped" in agent.launcher.of(wire.LauncherHello)[0].notices


RANKS = """
# Their parent does not look at them for a while, as torchrun does not.
"$PYTHON" -S -c '
import subprocess, sys, time
children = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
open("pids", "w").write("".join(f"{child.pid}\\n" for child in children))
time.sleep(1000)
'
"""


def _found(launched: Launched, agent: Any, attempt: int) -> list[int]:
    pids = _pids(launched, 2)
    agent.launcher.send(wire.RanksFound(attempt=attempt, pids=dict(enumerate(pids))))
    agent.processes(lambda r: [p.pid for p in r.processes] == pids, "the launcher knows them")
    return pids


def test_a_found_rank_is_watched_and_its_signal_is_told_though_another_reaps_it(tmp_path: pathlib.Path) -> None:
    with wrapped(tmp_path, RANKS, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = _found(launched, agent, 1)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        dead = agent.dead(1, 1)
        assert time.monotonic() - began < 0.5  # typically a few milliseconds
        assert (dead.pid, dead.signal, dead.code, dead.command_alive) == (pids[1], signal.SIGKILL, None, True)
        assert agent.launcher.of(wire.Processes)[-1].processes[0].alive


def test_ranks_that_outlive_their_command_are_told_as_such(tmp_path: pathlib.Path) -> None:
    with wrapped(tmp_path, RANKS.replace('"$PYTHON"', 'exec "$PYTHON"'), procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = _found(launched, agent, 1)
        command = pathlib.Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(command), signal.SIGKILL)
        report = agent.processes(lambda r: not any(p.command_alive for p in r.processes), "the command is dead")
        assert [(p.pid, p.alive, p.signal) for p in report.processes] == [(pid, True, 9) for pid in pids]
        agent.launcher.send(wire.StopRanks(attempt=1))
        until(lambda: not any(_alive(pid) for pid in pids), "they are ended with it", 5)


def test_where_nobody_saw_a_ranks_status_the_commands_failure_says_it_and_its_success_does_not(
    tmp_path: pathlib.Path,
) -> None:
    # A shell reaps its child at once. The first one then ends as its child did, the second one as if all was well.
    script = 'sleep 1000 &\necho $! > pids\nwait $!\nstatus=$?\n[ "$LASTWORDS_ATTEMPT" = 1 ] && exit $status\nexit 0\n'
    with wrapped(tmp_path, script, procs=1) as (launched, agent):
        for attempt in (1, 2):
            agent.launcher.send(order(attempt, 1))
            (pid,) = _pids(launched, 1)
            agent.launcher.send(wire.RanksFound(attempt=attempt, pids={0: pid}))
            agent.processes(lambda r, pid=pid: [p.pid for p in r.processes] == [pid], "the launcher knows it")
            (launched.folder / "pids").unlink()
            os.kill(pid, signal.SIGKILL)
            dead = agent.dead(0, attempt)
            if attempt == 1:
                assert dead.signal == signal.SIGKILL or dead.code == 128 + signal.SIGKILL
            else:
                assert dead.code is None and dead.signal in (None, signal.SIGKILL)


def test_a_process_that_is_not_the_commands_is_never_watched(tmp_path: pathlib.Path) -> None:
    with wrapped(tmp_path, "sleep 1000\n", procs=1) as (_, agent):
        agent.launcher.send(order(1, 1))
        first = agent.processes(lambda r: len(r.processes) == 1, "it runs")
        agent.launcher.send(wire.RanksFound(attempt=1, pids={0: os.getpid()}))
        reports = len(agent.launcher.of(wire.Processes))
        until(lambda: len(agent.launcher.of(wire.Processes)) > reports, "it is answered")
        assert agent.launcher.of(wire.Processes)[-1] == first


def test_a_command_that_cannot_be_executed_says_why(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF\0 no program")
    (tmp_path / "broken").chmod(0o755)
    (tmp_path / "volume").mkdir()
    launched = Launched(tmp_path, ["./broken"], procs=1, variables={})
    agent = FakeAgent(launched.volume)
    try:
        agent.launcher.send(order(1, 1))
        dead = agent.dead(0, 1)
        assert dead.code == 126
        assert "the command cannot be started" in dead.log_tail
    finally:
        end(launched, agent)


ENDINGS = """
import atexit, os, sys, time
import torch
from lastwords import Checkpointer

rank = int(os.environ["RANK"])
torch.manual_seed(0)
checkpointer = Checkpointer(model=torch.nn.Linear(2, 2))
checkpointer.restore()
assert "LASTWORDS_WRAPPED" not in os.environ
if os.fork() == 0:
    atexit._run_exitfuncs()  # a child of a rank is not the rank
    os._exit(9)
os.wait()
checkpointer.step_done()
print("ready", rank, flush=True)
if rank == 0:
    raise ValueError("bad input")
elif rank == 1:
    sys.exit(3)
while True:
    time.sleep(0.05)
"""


def test_how_a_script_ends_is_told_and_its_process_waits_until_the_agent_has_what_it_needs(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "ending.py").write_text(ENDINGS)
    script = """
export WORLD_SIZE=3 OMP_NUM_THREADS=1
for rank in 0 1 2; do RANK=$rank "$PYTHON" ending.py & pids[$rank]=$!; done
for rank in 0 1 2; do wait ${pids[$rank]}; echo "rank $rank: $?" >> codes; done
"""
    with wrapped(tmp_path, script, procs=3, may_exit=False) as (launched, agent):
        agent.launcher.send(order(1, 3))
        hellos = [agent.rank(rank, 1).of(wire.RankHello)[0] for rank in range(3)]
        failed = agent.ended(0, 1).exit
        assert (failed.code, failed.exception, failed.message) == (1, "ValueError", "bad input")
        assert "ending.py" in failed.traceback
        assert failed.step == 1
        left = agent.ended(1, 1).exit
        assert (left.code, left.exception, left.secondary) == (3, None, False)
        until(lambda: "ready 2" in _log(launched), "rank 2 is ready")
        os.kill(hellos[2].pid, signal.SIGTERM)
        asked = agent.ended(2, 1).exit
        assert (asked.signal, asked.secondary) == (signal.SIGTERM, True)
        time.sleep(0.3)
        assert all(_alive(hello.pid) for hello in hellos)
        assert all(len(agent.rank(rank, 1).of(wire.ScriptEnded)) == 1 for rank in range(3))
        for rank in range(3):
            agent.rank(rank, 1).send(wire.MayExit())
        codes = tmp_path / "codes"
        until(lambda: codes.exists() and codes.read_text().count("\n") == 3, "they end", 20)
        assert codes.read_text() == "rank 0: 1\nrank 1: 3\nrank 2: 143\n"
        assert _log(launched).count("ValueError: bad input") == 1
