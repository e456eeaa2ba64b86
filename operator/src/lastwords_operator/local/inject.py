"""
`--inject`: faults made on purpose, each once, when the job reaches a step.

    kill rank=1 at-step=30          SIGKILL
    stop rank=2 at-step=60          SIGSTOP: a hang
    kill launcher worker=0 at-step=90
    kill agent worker=1 at-step=120
    lose worker=1 at-step=150       all its processes and its memory, as when a node dies

What was injected is written to the job folder first, so that a coordinator that takes over does not do it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from lastwords.protocol.messages import AgentReport, RankState
from lastwords_operator.coordinator import ports
from lastwords_operator.core.observation import AGENT, TRAINER
from lastwords_operator.local.folder import append_line, read_lines

EXAMPLE = "'kill rank=1 at-step=30', 'stop rank=2 at-step=60', 'lose worker=1 at-step=90'"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_LOSE = "lose"
_WORKER = "worker"


class InjectError(ValueError):
    """Not a fault that can be made; the text says what is wrong and shows the form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to make. `target` is rank, launcher, agent or worker; `number` is the rank, or else the worker."""

    action: str
    target: str
    number: int
    at_step: int

    def __str__(self) -> str:
        container = "" if self.target in ("rank", _WORKER) else f"{self.target} "
        noun = "rank" if self.target == "rank" else _WORKER
        return f"{self.action} {container}{noun}={self.number} at-step={self.at_step}"


def parse(text: str, workers: int, procs: int) -> Fault:
    """The fault of one `--inject`. Raises InjectError."""
    found = re.fullmatch(r"(\w+)\s+(?:(launcher|agent)\s+)?(worker|rank)=(\d+)\s+at-step=(\d+)", text.strip())
    if found is None:
        raise InjectError(f"--inject {text!r} is not understood; write for example {EXAMPLE}")
    action, container, noun, number, step = found[1], found[2], found[3], int(found[4]), int(found[5])
    actions = (*_SIGNALS, _LOSE)
    if action not in actions:
        raise InjectError(f"--inject {text!r}: {action!r} is not one of {', '.join(actions)}; for example {EXAMPLE}")
    whole_worker = noun == _WORKER and container is None
    if (container is not None and noun == "rank") or whole_worker != (action == _LOSE):
        raise InjectError(f"--inject {text!r} is not understood; write for example {EXAMPLE}")
    count = workers if noun == _WORKER else workers * procs
    if number >= count:
        raise InjectError(f"--inject {text!r}: there is no {noun} {number}; the last one is {count - 1}")
    return Fault(action=action, target=container or noun, number=number, at_step=step)


class Injector:
    """Watches the reports and makes each fault once."""

    def __init__(self, faults: Sequence[Fault], journal: pathlib.Path, procs: int, lose: Callable[[int], None]) -> None:
        self._journal = journal
        self._lose = lose
        self._procs = procs
        done = {row.get("fault") for row in read_lines(journal)}
        self._open = [fault for fault in dict.fromkeys(faults) if str(fault) not in done]

    def step(self, reports: Mapping[int, AgentReport], containers: Iterable[ports.Containers]) -> list[str]:
        """Make the faults that are due; returns them in words."""
        made = []
        pids = {row.worker: row.pids for row in containers}
        for fault in list(self._open):
            pid = self._victim(fault, reports, pids)
            if not pid:
                continue
            self._open.remove(fault)
            append_line(self._journal, {"fault": str(fault), "pid": pid})
            if fault.action == _LOSE:
                self._lose(fault.number)
                made.append(str(fault))
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[fault.action])
                made.append(f"{fault} (process {pid})")
        return made

    def _victim(self, fault: Fault, reports: Mapping[int, AgentReport], pids: Mapping[int, Mapping[str, int]]) -> int:
        """Process to hit now, or 0: not yet."""
        worker = fault.number // self._procs if fault.target == "rank" else fault.number
        report = reports.get(worker)
        if report is None:
            return 0
        running = [rank for rank in report.ranks if rank.state is RankState.RUNNING]
        if fault.target == "rank":
            running = [rank for rank in running if rank.rank == fault.number]
        if not any(rank.step is not None and rank.step >= fault.at_step for rank in running):
            return 0
        if fault.target == "rank":
            return running[0].pid
        return pids.get(worker, {}).get(AGENT if fault.target == "agent" else TRAINER, 0)
