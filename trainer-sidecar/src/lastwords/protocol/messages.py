"""
Agent and coordinator: the agent reports what *is*, the coordinator orders what *should be*. Both are whole
values, not events: any of them may be lost or repeated, the newest one is enough.

The channel is one WebSocket per worker, opened by the worker; each text frame is one JSON object
{"kind": "hello" | "report" | "order", ...}.
"""

from __future__ import annotations

import dataclasses
import enum

from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.pieces import TableSummary, Topology
from lastwords.protocol.snapshots import SnapshotPlan

PROTOCOL_VERSION = 1


class RankState(str, enum.Enum):
    """Where a rank process is."""

    ABSENT = "absent"
    STARTING = "starting"
    """Process exists; not restored yet."""
    RUNNING = "running"
    ERRORED = "errored"
    """The script ended with an exception; the process still lives and holds its state."""
    FINISHED = "finished"
    """`steps()` ended, or the script ended normally."""
    EXITED = "exited"


class RunState(str, enum.Enum):
    """What the ranks of a worker should do."""

    STOPPED = "stopped"
    """No rank process of any attempt."""
    RUNNING = "running"
    ENDED = "ended"
    """No rank process; launcher and agent end too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitReport:
    """How a rank ended, or with which exception it is about to. `secondary`: only the echo of another's death."""

    code: int | None = None
    signal: int | None = None
    exception: str | None = None
    """Qualified name of the exception's type."""
    message: str = ""
    traceback: str = ""
    step: int | None = None
    secondary: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackReport:
    """Where a rank was when it was asked. `responsive` False: the process did not answer (stopped, or GIL held)."""

    responsive: bool
    process_state: str = ""
    """Letter of /proc/<pid>/stat: R, S, D, T, Z."""
    in_collective: bool | None = None
    phase: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank as its agent sees it. Ages are seconds at the moment of the report."""

    rank: int
    state: RankState
    pid: int = 0
    step: int | None = None
    """Boundaries passed; None until restored."""
    odd: bool = False
    """An update has begun and its boundary is not passed."""
    in_tail: bool = False
    """`steps()` is over, but the script goes on (a last evaluation, an export)."""
    held: bool = False
    """The process has acknowledged the hold."""
    at_gate: bool = False
    phase: str | None = "startup"
    """None: unreadable; the longest deadline applies."""
    phase_timeout_seconds: float | None = None
    quiet_seconds: float = 0.0
    """Since the last boundary or phase change."""
    step_seconds: float | None = None
    """Duration of the last whole step."""
    exit: ExitReport | None = None
    stack: StackReport | None = None
    plan_number: int = 0
    loss: float | None = None
    first_step_age_seconds: float | None = None
    """Since this attempt's first new step; None: not yet."""
    restored_age_seconds: float | None = None
    stall_seconds_last: float = 0.0
    copy_seconds_last: float = 0.0
    snapshots: int = 0
    snapshots_skipped: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartHolding:
    """A READY part in the worker's memory volume."""

    rank: int
    slot: int
    step: int
    attempt: int
    generation: int
    finite: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordHolding:
    """A small record that this agent can hand over. `neighbour`: it is of another worker's rank."""

    rank: int
    step: int
    attempt: int
    provisional: bool = False
    neighbour: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint found in storage. `rejected`: why it is no candidate ("" = it is one)."""

    id: CheckpointId
    kind: str = "periodic"
    finite: bool = True
    nbytes: int = 0
    rejected: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageReport:
    """How saving to storage goes."""

    loaded: bool = False
    """The inventory of checkpoints has been read since the agent started."""
    checkpoints: tuple[CheckpointInfo, ...] = ()
    persisting: CheckpointId | None = None
    persisting_seconds: float = 0.0
    """How long that has been going on."""
    failures_in_row: int = 0
    skipped: int = 0
    """Saves of this agent that were given up: their snapshot was needed for another one, or a newer one was due."""
    error: str = ""
    persist_seconds_last: float = 0.0
    commit_seconds_last: float = 0.0
    """From snapshot complete to manifest written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the user must know once. `fatal`: restarting will not help (state cannot be saved, wrong model…)."""

    code: str
    text: str
    rank: int | None = None
    fatal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Answer to a restore plan: the worker's own memory now holds (or cannot get) what its ranks need."""

    attempt: int
    ok: bool
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentReport:
    """Everything a worker's agent knows; sent on change (at most every 20 ms) and at least once a second."""

    worker: int
    incarnation: str
    """Which pod or local worker this is; a replacement has another one."""
    agent_run: str = ""
    """New for each start of the agent process."""
    epoch_seen: int = 0
    order_seen: int = 0
    """Number of the last order taken in."""
    attempt: int = 0
    """Attempt that the worker's ranks belong to; 0 = none yet."""
    run: RunState = RunState.STOPPED
    """What is: RUNNING as soon as one rank process of `attempt` exists."""
    launcher: bool = False
    launcher_error: str = ""
    fetch_address: str = ""
    store_address: str = ""
    """host:port of the attempt's TCPStore; worker 0 only."""
    ranks: tuple[RankReport, ...] = ()
    parts: tuple[PartHolding, ...] = ()
    records: tuple[RecordHolding, ...] = ()
    table: TableSummary | None = None
    layout_attempt: int = 0
    """Attempt that `table` was made in."""
    storage: StorageReport = StorageReport()
    self_hold: int = 0
    """Counts the times this worker held itself; in force while above the order's `release_hold`."""
    copied: tuple[int, ...] = ()
    """Live-copy orders (by number) that are done."""
    copy_errors: tuple[str, ...] = ()
    prepared: Prepared | None = None
    notices: tuple[Notice, ...] = ()
    stop_requested: str = ""
    """Somebody asked the worker to stop (SIGTERM): the reason."""
    protocol_version: int = PROTOCOL_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """First frame of an agent."""

    worker: int
    incarnation: str
    agent_run: str
    token: str = ""
    protocol_version: int = PROTOCOL_VERSION


class RestoreSource(str, enum.Enum):
    """Where an attempt begins."""

    BEGINNING = "beginning"
    MEMORY = "memory"
    CHECKPOINT = "checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """
    Where every rank of an attempt gets its state. `parts`: for MEMORY, the worker from whose memory the
    part of each rank comes (the rank's own worker where that has it). `records` likewise for the small
    records; a rank that is not in it is reseeded (`exact` is then False).
    """

    source: RestoreSource
    step: int = 0
    attempt: int = 0
    """Attempt under whose number the state is kept."""
    parts: dict[int, int] = dataclasses.field(default_factory=dict)
    records: dict[int, int] = dataclasses.field(default_factory=dict)
    exact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveCopy:
    """Copy the live state at `step` into slots: for each part (by rank) the local rank that writes it."""

    number: int
    step: int
    writers: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistOrder:
    """Persist (step, attempt) from memory now. `parts`: all ranks (over the job) whose parts are ready."""

    step: int
    attempt: int
    kind: str
    parts: tuple[int, ...]
    record_ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """
    What a worker should be doing. A lower (epoch, number) is refused; equal ones are repeats.
    """

    epoch: int
    number: int
    attempt: int
    run: RunState
    topology: Topology
    lineage: tuple[LineageEntry, ...] = ()
    restore: RestorePlan | None = None
    peers: dict[int, str] = dataclasses.field(default_factory=dict)
    """Fetch address of each worker's agent."""
    store_address: str = ""
    """The attempt's TCPStore, once known; ranks are released into it."""
    hold: bool = False
    release_hold: int = 0
    """The worker's own holds up to this count are over."""
    release_to: int | None = None
    """Held ranks may make updates until they have passed this step."""
    live_copy: LiveCopy | None = None
    stacks: int = 0
    """When above the last one served: collect the stacks of all ranks."""
    persist: PersistOrder | None = None
    plan: SnapshotPlan | None = None
    replicas: int = 0
    """How many other workers keep each snapshot of this one."""
    keep_last: int = 3
    keep_every: int = 0
    """Beside these, the first checkpoint at or after every so many steps; 0 = none."""
    in_use: tuple[CheckpointId, ...] = ()
    """Checkpoints that retention must not touch."""
    kill_grace_seconds: float = 0.0
    """When stopping: SIGTERM first and SIGKILL after this; 0 = SIGKILL at once."""
