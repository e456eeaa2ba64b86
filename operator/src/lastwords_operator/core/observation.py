"""What `decide` sees, and what it answers: frozen values, nothing else goes in or out."""

from __future__ import annotations

import dataclasses

from lastwords.protocol.messages import AgentReport, RankReport, RankState, WorkerOrder
from lastwords_operator.core.model import JobSpec, JobStatus

AGENT = "agent"
TRAINER = "trainer"
RUNNING = "running"
DEAD = "dead"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerView:
    """
    One worker as the coordinator sees it. `report` is the newest one of this incarnation, also after the
    connection ended; it is believed only while `connected`. `containers` by name (AGENT, TRAINER): RUNNING or DEAD;
    one that is not in it is not known about.
    """

    worker: int
    incarnation: str = ""
    node: str = ""
    connected: bool = False
    silent_seconds: float = 0.0
    report: AgentReport | None = None
    containers: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything a decision may depend on."""

    now: float
    spec: JobSpec
    status: JobStatus
    workers: tuple[WorkerView, ...]
    stop_requested: str = ""
    """Why the user wants the job to stop; "" = he does not."""
    epoch: int = 1
    """Grows with every start of a coordinator for this job."""
    coordinator_started_at: float = 0.0

    def view(self, worker: int) -> WorkerView:
        """The worker's view; an empty one when nothing is known."""
        return next((view for view in self.workers if view.worker == worker), WorkerView(worker=worker))

    def report(self, worker: int) -> AgentReport | None:
        """The report of a worker that is connected."""
        view = self.view(worker)
        return view.report if view.connected else None

    def reports(self) -> dict[int, AgentReport]:
        """Reports of all connected workers of the job, by worker."""
        found = {worker: self.report(worker) for worker in range(self.spec.workers)}
        return {worker: report for worker, report in found.items() if report is not None}

    def ranks(self) -> dict[int, RankReport]:
        """Ranks of the attempt in force, of connected workers; ranks of older attempts are not in it."""
        return {
            rank.rank: rank
            for report in self.reports().values()
            if report.attempt == self.status.attempt
            for rank in report.ranks
            if rank.state is not RankState.ABSENT
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnsureWorker:
    """The worker's launcher and agent should be there: start what is missing or dead, leave alone what runs."""

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaceWorker:
    """End this incarnation of the worker with everything it runs, and start another. Its memory may be lost."""

    worker: int
    incarnation: str
    reason: str


Action = EnsureWorker | ReplaceWorker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something the user should hear of once. `reason` is one word, `warning` marks trouble."""

    reason: str
    message: str
    warning: bool = False
    worker: int | None = None
    rank: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """
    The answer. Write `status` first; then send `orders` (by worker), carry out `actions`, announce `events`.
    Decide again at `wake_at` even if nothing was heard until then.
    """

    status: JobStatus
    orders: dict[int, WorkerOrder]
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float | None = None
    reason: str = ""
