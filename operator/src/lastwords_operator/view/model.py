"""What is shown of a job: one frozen value, made by the acting coordinator, rendered here or by whoever attaches."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank."""

    rank: int
    state: str
    step: int | None = None
    loss: float | None = None
    phase: str = ""
    quiet_seconds: float = 0.0
    held: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker: its two processes (0 = not running), how often each was started again, its ranks."""

    worker: int
    agent_pid: int = 0
    launcher_pid: int = 0
    agent_restarts: int = 0
    launcher_restarts: int = 0
    connected: bool = False
    silent_seconds: float = 0.0
    ranks: tuple[RankView, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryView:
    """One fault and what became of it. `phases`: milliseconds from the fault to each thing done, in order."""

    number: int
    fault: str
    at: float
    source: str = ""
    step: int | None = None
    steps_lost: int | None = None
    exact: bool = True
    phases: tuple[tuple[str, float], ...] = ()
    done: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventView:
    """One line of the timeline."""

    at: float
    kind: str
    text: str
    warning: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobView:
    """The whole picture at one moment (`at`, unix seconds)."""

    name: str
    folder: str
    at: float
    state: str
    reason: str = ""
    attempt: int = 0
    started_at: float = 0.0
    step: int | None = None
    loss: float | None = None
    snapshot_step: int | None = None
    """Newest step of which all parts are in memory."""
    checkpoint_step: int | None = None
    """Newest committed checkpoint."""
    storage_error: str = ""
    cold_start: str = ""
    """Why a restart of this job takes longer than it could; "" = it does not."""
    workers: tuple[WorkerView, ...] = ()
    recoveries: tuple[RecoveryView, ...] = ()
    events: tuple[EventView, ...] = ()
    """The newest ones."""
    traceback: str = ""
    """Why the job failed, when its script raised an exception."""
    finished: bool = False
    exit_code: int | None = None
