"""Faults on purpose: understood or refused with the reason, made once."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lastwords.protocol.messages import AgentReport, RankReport, RankState
from lastwords_operator.coordinator import ports
from lastwords_operator.core.observation import AGENT, TRAINER
from lastwords_operator.local import inject


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill rank=1 at-step=30", inject.Fault(action="kill", target="rank", number=1, at_step=30)),
        (" stop  rank=3  at-step=60 ", inject.Fault(action="stop", target="rank", number=3, at_step=60)),
        ("kill launcher worker=0 at-step=9", inject.Fault(action="kill", target="launcher", number=0, at_step=9)),
        ("kill agent worker=1 at-step=1", inject.Fault(action="kill", target="agent", number=1, at_step=1)),
        ("lose worker=1 at-step=5", inject.Fault(action="lose", target="worker", number=1, at_step=5)),
    ],
)
def test_understood(text: str, fault: inject.Fault) -> None:
    assert inject.parse(text, workers=2, procs=2) == fault
    assert inject.parse(str(fault), workers=2, procs=2) == fault


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not understood; write for example 'kill rank=1"),
        ("kill rank=1", "is not understood"),
        ("kill rank=one at-step=3", "is not understood"),
        ("kill worker=1 at-step=3", "is not understood"),
        ("lose rank=1 at-step=3", "is not understood"),
        ("lose agent worker=1 at-step=3", "is not understood"),
        ("kill agent rank=1 at-step=3", "is not understood"),
        ("lose worker=2 at-step=3", "there is no worker 2; the last one is 1"),
        ("tickle rank=1 at-step=3", "'tickle' is not one of kill, stop, lose"),
        ("kill rank=4 at-step=3", "there is no rank 4; the last one is 3"),
        ("kill agent worker=2 at-step=3", "there is no worker 2; the last one is 1"),
    ],
)
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises(inject.InjectError, match=sentence):
        inject.parse(text, workers=2, procs=2)


LOST: list[int] = []


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def reports(pid: int, step: int | None, state: RankState = RankState.RUNNING) -> dict[int, AgentReport]:
    ranks = (
        RankReport(rank=2, state=RankState.RUNNING, pid=1, step=99),
        RankReport(rank=3, state=state, pid=pid, step=step),
    )
    return {1: AgentReport(worker=1, incarnation="a", ranks=ranks)}


def test_made_once_when_its_step_is_reached(tmp_path: pathlib.Path, victim: subprocess.Popen[bytes]) -> None:
    fault = inject.parse("kill rank=3 at-step=10", 2, 2)
    injector = inject.Injector([fault], tmp_path / "journal", 2, LOST.append)
    assert injector.step(reports(victim.pid, None), []) == []
    assert injector.step(reports(victim.pid, 9), []) == []
    assert injector.step(reports(victim.pid, 50, RankState.EXITED), []) == []
    assert injector.step(reports(victim.pid, 10), []) == [f"kill rank=3 at-step=10 (process {victim.pid})"]
    assert victim.wait(timeout=10) == -signal.SIGKILL
    assert injector.step(reports(victim.pid, 11), []) == []


def test_not_made_again_by_the_next_coordinator(tmp_path: pathlib.Path, victim: subprocess.Popen[bytes]) -> None:
    fault = inject.parse("stop rank=3 at-step=10", 2, 2)
    assert inject.Injector([fault], tmp_path / "journal", 2, LOST.append).step(reports(victim.pid, 10), [])
    assert inject.Injector([fault], tmp_path / "journal", 2, LOST.append).step(reports(victim.pid, 10), []) == []


@pytest.mark.parametrize("target", ["agent", "launcher"])
def test_containers_are_hit_too(tmp_path: pathlib.Path, victim: subprocess.Popen[bytes], target: str) -> None:
    fault = inject.parse(f"kill {target} worker=1 at-step=10", 2, 2)
    injector = inject.Injector([fault], tmp_path / "journal", 2, LOST.append)
    name = AGENT if target == "agent" else TRAINER
    rows = [ports.Containers(worker=1, incarnation="a", pids={name: victim.pid}, starts={name: 1})]
    assert injector.step(reports(0, 12), []) == []
    assert len(injector.step(reports(0, 12), rows)) == 1
    assert victim.wait(timeout=10) == -signal.SIGKILL
