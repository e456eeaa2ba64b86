"""The zygote: what it forks is like a process that was started; its end is no fault; where unsafe it is not used."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from lastwords.protocol import wire
from tests.processes.launcher.fake_agent import FakeAgent, Launched, end, order, until, worker

pytestmark = pytest.mark.slow  # each starts interpreters with torch

SLEEP = "import time; print('sleeping', flush=True); time.sleep(1000)"

DRAWS = """
import json, multiprocessing, os, random, sys, numpy, torch
square = numpy.ones((512, 512))
square @ square
print(json.dumps({
    "random": random.random(), "numpy": float(numpy.random.rand()), "generator": numpy.random.default_rng().random(),
    "authkey": multiprocessing.current_process().authkey.hex(), "torch": torch.rand(1).item(),
    "threads": [len(os.listdir("/proc/self/task")), torch.get_num_threads()],
    "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0),
    "devices": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in "012"),
}), flush=True)
"""


def _sleep(launched: Launched, agent: FakeAgent, attempt: int, count: int) -> dict[int, int]:
    pids = agent.running(attempt, count)
    for rank in range(count):
        until(lambda rank=rank: "sleeping" in launched.log(rank, attempt), f"rank {rank} sleeps")
    return pids


def _no_death_was_told(agent: FakeAgent) -> bool:
    return all(p.alive for report in agent.launcher.of(wire.Processes) for p in report.processes)


def test_forked_ranks_are_like_processes_of_their_own(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, DRAWS, procs=2, OMP_NUM_THREADS="2") as (launched, agent):
        agent.processes(lambda r: r.standbys == 2, "two were forked ahead")
        assert launched.zygote() and len(launched.waiting()) == 2
        agent.launcher.send(order(1, 2))
        for rank in range(2):
            assert agent.dead(rank, 1).code == 0, launched.log(rank, 1)
        plain = json.loads(
            subprocess.check_output(
                [sys.executable, "script.py"], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "2"}
            )
        )
        one, other = (json.loads(launched.log(rank, 1)) for rank in range(2))
        for name in ("random", "numpy", "generator", "torch", "authkey"):
            assert len({one[name], other[name], plain[name]}) == 3, name
        # Nobody's number of threads was changed; those of OpenBLAS come when they are needed.
        # Here there is the link's thread too; rank 0 hosts the store besides.
        assert other["threads"] == [plain["threads"][0] + 1, plain["threads"][1]] and plain["threads"][0] > 1
        for seen in (one, other):
            assert seen["parent"] == seen["session"] == launched.process.pid and seen["group"]
            assert [name.split(":")[0] for name in seen["devices"]] == ["/dev/null", "pipe", "pipe"]
        assert one["devices"] != other["devices"]


def test_the_zygotes_end_is_no_fault_and_another_one_is_made(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, SLEEP, procs=2) as (launched, agent):
        until(launched.zygote, "it is there")
        agent.launcher.send(order(1, 2))
        agent.processes(lambda r: len(r.processes) == 2, "two ranks wait to be born")
        os.kill(first := launched.zygote(), signal.SIGKILL)
        pids = _sleep(launched, agent, 1, 2)  # started as interpreters, without a new order
        assert _no_death_was_told(agent)
        second = until(lambda: (pid := launched.zygote()) not in (0, first) and pid, "another one is made")
        assert "ranks go on" in launched.output
        agent.launcher.send(order(2, 1))
        _sleep(launched, agent, 2, 1)
        # Now it has made its processes: they outlive it.
        os.kill(second, signal.SIGKILL)
        until(lambda: launched.output.count("ranks go on") == 2, "its death is seen")
        assert _no_death_was_told(agent) and not set(pids.values()) & set(launched.left())


def test_a_zygote_that_does_not_answer_is_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(SLEEP)
    patch = "import lastwords.launcher.zygote as z; z._FORK_SECONDS = 0.5"
    launched = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={}, patch=patch)
    agent = FakeAgent(launched.volume)
    try:
        agent.processes(lambda r: r.standbys == 1, "one was forked ahead")
        os.kill(launched.zygote(), signal.SIGSTOP)
        agent.launcher.send(order(1, 2))  # one more than there are
        _sleep(launched, agent, 1, 2)
        assert _no_death_was_told(agent)
    finally:
        end(launched, agent)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("import threading, time; threading.Thread(None, time.sleep, 'own', (999,), daemon=True).start()", "own"),
        ("import os; os.open('/dev/kmsg', os.O_WRONLY)", "/dev/kmsg"),
    ],
    ids=["thread", "device"],
)
def test_where_imports_do_more_than_import_interpreters_are_used(
    tmp_path: pathlib.Path, what: str, reason: str
) -> None:
    if "/dev/kmsg" in what and not os.access("/dev/kmsg", os.W_OK):
        pytest.skip("there is no device here that this user may open")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(what)
    with worker(tmp_path, SLEEP, procs=1, PYTHONPATH=str(tmp_path / "site")) as (launched, agent):
        report = agent.processes(lambda r: r.standbys == 1, "a standby is ready")
        assert reason in report.cold_reason and reason in launched.output
        agent.launcher.send(order(1, 1))
        _sleep(launched, agent, 1, 1)
        assert _no_death_was_told(agent) and not launched.zygote()
