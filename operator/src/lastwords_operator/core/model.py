"""
What the core knows of a job: its specification and its status, as plain frozen values.

All times are seconds of one wall clock (the same as `Observation.now`); all deadlines are absolute, so that a
coordinator that starts again goes on where the old one stopped. Statuses go through `lastwords.protocol.codec`.
"""

from __future__ import annotations

import dataclasses
import enum

from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.messages import PersistOrder, RestorePlan, RestoreSource
from lastwords.protocol.pieces import Topology
from lastwords.protocol.snapshots import SnapshotPlan

# --- specification ----------------------------------------------------------------------------------


class RuleAction(enum.StrEnum):
    """What a failure rule does."""

    FAIL_JOB = "FailJob"
    RESTART = "Restart"
    """Restart, and count it against `max_restarts`."""
    IGNORE = "Ignore"
    """Restart without counting, as for a fault of the infrastructure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureRule:
    """
    First rule that matches decides. Each given field must match; exit codes are those of the rank's process,
    128 + n for signal n. `on_exceptions` are names of exception types, with or without their module.
    """

    action: RuleAction
    on_exit_codes: tuple[int, ...] = ()
    exit_codes_in: bool = True
    """False: the codes that are not listed."""
    on_exceptions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """When a fault is answered by a restart, and when the job fails."""

    rules: tuple[FailureRule, ...] = ()
    max_restarts: int = 10
    """Counted restarts; also the most restarts in a row without one new step, whatever their cause."""
    startup_failures: int = 2
    """As many errors of the script before its first step in a row make the job fail."""
    stable_seconds: float = 600.0
    """After as long without a fault the whole budget is there again."""
    back_off_seconds: float = 1.0
    back_off_limit_seconds: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Longest time, in seconds, that something may take before it counts as a fault."""

    startup: float = 600.0
    restore: float = 600.0
    first_step: float = 600.0
    training_floor: float = 30.0
    training_factor: float = 10.0
    """A step may take this many times the last one, and never less than `training_floor`."""
    save: float = 600.0
    evaluate: float = 3600.0
    silent: float = 10.0
    """A worker's agent that was not heard for so long counts as silent."""
    reconnect: float = 10.0
    """After the coordinator's own start nobody counts as silent for so long."""
    gather: float = 60.0
    """A worker that did not come, or did not end its ranks, for so long is replaced."""
    finish: float = 300.0
    """How long a last checkpoint may take to be committed once the ranks are through."""
    tail: float = 3600.0
    """How long a script may go on after its last step is saved (an evaluation, an export)."""


class IntervalMode(enum.StrEnum):
    """How the interval between snapshots is found."""

    AUTO = "Auto"
    FIXED_SECONDS = "FixedSeconds"
    FIXED_STEPS = "FixedSteps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """`seconds` and `steps` count in the mode of that name only."""

    mode: IntervalMode = IntervalMode.AUTO
    seconds: float = 60.0
    steps: int = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user wants, as far as decisions depend on it."""

    name: str
    workers: int
    processes_per_worker: int
    interval: Interval = Interval()
    keep_last: int = 3
    keep_every: int = 0
    """Beside these, the first checkpoint at or after every so many steps; 0 = none."""
    replicas: int = 0
    """Other workers that keep each snapshot of a worker."""
    last_words: bool = True
    last_words_timeout: float = 60.0
    policy: FailurePolicy = FailurePolicy()
    deadlines: Deadlines = Deadlines()
    suspend: bool = False
    allow_beginning: bool = False
    """Permission to start at step 0 although the job had made progress and nothing of it can be used."""

    @property
    def topology(self) -> Topology:
        """Workers and ranks."""
        return Topology(workers=self.workers, processes_per_worker=self.processes_per_worker)


# --- faults -----------------------------------------------------------------------------------------


class FaultKind(enum.StrEnum):
    """What went wrong, by its root."""

    RANK_KILLED = "RankKilled"
    RANK_CRASHED = "RankCrashed"
    """Ended by a signal that its own code caused (SIGSEGV, SIGABRT …)."""
    RANK_EXITED = "RankExited"
    """Left with a bad exit code and no exception."""
    USER_EXCEPTION = "UserException"
    LAUNCHER_LOST = "LauncherLost"
    WORKER_LOST = "WorkerLost"
    """Silent while the steps stopped, or another incarnation in its place."""
    WORKER_STOPPING = "WorkerStopping"
    """Somebody told the worker to stop."""
    NETWORK = "Network"
    """Only echoes were seen: connections broke and nobody died."""
    HANG = "Hang"
    START_TIMEOUT = "StartTimeout"
    RESTORE_FAILED = "RestoreFailed"
    """The state that was chosen could not be fetched or read; another one is tried."""
    FATAL = "Fatal"
    """A restart will not help: the command does not exist, the state cannot be saved …"""
    NON_FINITE = "NonFinite"
    """The state became NaN or infinite again, at the step where it had before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One root fault. `infrastructure`: not the program's doing, so it does not use up its budget."""

    kind: FaultKind
    message: str
    infrastructure: bool
    worker: int | None = None
    rank: int | None = None
    step: int | None = None
    exit_code: int | None = None
    """128 + n for signal n."""
    exception: str = ""
    error: str = ""
    """What the exception says, without step and rank: the same again is recognised by it."""
    traceback: str = ""
    before_first_step: bool = False
    seconds_to_detect: float = 0.0
    provisional: bool = False
    """Only echoes so far; a root may still show up."""


# --- status -----------------------------------------------------------------------------------------


class JobState(enum.StrEnum):
    """Where a job is in its life."""

    PENDING = "Pending"
    GATHERING = "Gathering"
    STARTING = "Starting"
    RUNNING = "Running"
    LAST_WORDS = "LastWords"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def ranks_run(self) -> bool:
        """Whether rank processes of `status.attempt` are wanted in this state."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.LAST_WORDS)

    @property
    def over(self) -> bool:
        """Whether nothing follows any more."""
        return self in (JobState.COMPLETE, JobState.FAILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A state that ranks can start from."""

    source: RestoreSource
    step: int
    attempt: int
    exact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastWords:
    """How far the last words of a fault have come."""

    fault: Fault
    began_at: float
    deadline: float
    hold_deadline: float
    """Until then ranks that are believed alive may still acknowledge the hold."""
    newest_step: int = 0
    """Newest boundary that any rank had passed: what "steps lost" is counted from."""
    release_to: int | None = None
    release_deadline: float | None = None
    tried: tuple[int, ...] = ()
    """Steps whose live copy failed: not tried again, except from what is ready."""
    refusals: tuple[str, ...] = ()
    """Why newer steps could not be kept."""
    kept: Source | None = None
    """Set once: what is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """The live copy under way. `writers`: part (by rank) to the rank that writes it, over all workers."""

    number: int
    step: int
    deadline: float
    writers: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """One row for each root fault. Times are absolute; None = not reached (yet)."""

    kind: FaultKind
    message: str
    attempt: int
    """Attempt that the fault ended."""
    worker: int | None = None
    node: str = ""
    rank: int | None = None
    infrastructure: bool = True
    seconds_to_detect: float = 0.0
    detected_at: float = 0.0
    kept_at: float | None = None
    stopped_at: float | None = None
    started_at: float | None = None
    restored_at: float | None = None
    first_step_at: float | None = None
    source: RestoreSource | None = None
    step: int | None = None
    """Step that is gone on from."""
    steps_lost: int | None = None
    exact: bool | None = None
    """False: some rank was reseeded, the run is not bit-equal to an undisturbed one."""
    interrupted: bool = False
    """Another fault struck before the first new step."""
    exit_code: int | None = None
    """Of the rank that brought it about, 128 + n for signal n."""
    traceback: str = ""
    """Kept for the newest row only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorMark:
    """An error of the script, to recognise it when it comes again."""

    text: str
    step: int | None
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """Something that holds or does not, with the reason in one word and in a sentence."""

    type: str
    status: bool
    reason: str
    message: str = ""
    since: float = 0.0


class StopKind(enum.StrEnum):
    """How a job ends before its steps are through."""

    SUSPEND = "Suspend"
    FAIL = "Fail"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """The job is being stopped. `deadline`: ranks that have not stopped by themselves then are held and ended."""

    kind: StopKind
    reason: str
    deadline: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoldRelease:
    """Holds up to `count` that the agent process `agent_run` made by itself are over."""

    agent_run: str
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excluded:
    """A source that was chosen and could not be read; one row each time. See `restore.choose`."""

    source: RestoreSource
    step: int
    attempt: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Everything that must survive the coordinator. `state` JobState; see the fields' notes."""

    state: JobState = JobState.PENDING
    state_since: float = 0.0
    message: str = ""
    """Why it is in this state, in words."""
    attempt: int = 0
    lineage: tuple[LineageEntry, ...] = ()
    restore: RestorePlan | None = None
    """Where the attempt began."""
    plan: SnapshotPlan = dataclasses.field(default_factory=SnapshotPlan)
    plan_since: float = 0.0
    last_words: LastWords | None = None
    stop: Stop | None = None
    recoveries: tuple[Recovery, ...] = ()
    restarts: int = 0
    """Counted restarts since the budget was last given back."""
    restarts_total: int = 0
    infrastructure_restarts: int = 0
    restarts_without_progress: int = 0
    """In a row, whatever the cause, with no new step between them."""
    startup_failures: int = 0
    back_off_until: float | None = None
    last_error: ErrorMark | None = None
    stable_since: float | None = None
    """First new step of the attempt in force."""
    progress_step: int = 0
    """Newest step that all ranks had passed when the status was last written; refreshed now and then."""
    progress_at: float = 0.0
    newest_checkpoint: int | None = None
    """Step of the newest committed checkpoint that can be used."""
    was_saved: bool = False
    """A whole state has once stood in memory or storage: from then on the job never begins anew without permission."""
    non_finite_step: int | None = None
    """Where the state first became NaN or infinite, in an earlier or this attempt."""
    non_finite_attempt: int = 0
    kept_in_memory: bool = False
    """Suspended or failed with a state that is newer in the workers' memory than in storage: keep the volumes."""
    excluded: tuple[Excluded, ...] = ()
    releases: dict[int, HoldRelease] = dataclasses.field(default_factory=dict)
    incarnations: dict[int, str] = dataclasses.field(default_factory=dict)
    """Which worker each index was when the attempt started."""
    suspicions: dict[str, float] = dataclasses.field(default_factory=dict)
    """Things that only count if they last, and since when they do."""
    notices: tuple[str, ...] = ()
    """Notices that were announced already (code and rank)."""
    conditions: tuple[Condition, ...] = ()
    order_number: int = 0
    order_digest: str = ""
    stop_order: int = 0
    """A worker that has seen the order of this number knows that its ranks must end."""
    copies: int = 0
    """Live copies ordered so far; the newest one's number."""
    stacks: int = 0
    """Stack collections ordered so far."""
    copy: Copy | None = None
    persist: PersistOrder | None = None
    """Kept state that has to reach storage before the job may end."""
    persist_deadline: float | None = None
    tail_deadline: float | None = None
    """All steps are saved; until then scripts that go on after them may end by themselves."""
