"""
Which troubles of a job enter the failure rates, and what they teach: rates per node and per job, and what last words
kept.

Exposure counts only while all ranks step: waiting, loading and recovering are no chance to lose work, and would make
a job that recovers slowly look reliable. One trouble of a gang is one event, however many ranks and nodes report it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from lastwords_operator.core import rate
from lastwords_operator.core.model import Fault, FaultKind

HALF_LIFE_HOURS = 90 * 24.0
"""Long, since a change of the rate is noticed by itself: on records of rare failures 30 days cost 5 % more."""
MOST_MERGE_SECONDS = 600.0
"""Records of whole clusters show followers of one incident within ten minutes."""


class Cause(enum.StrEnum):
    """Whose doing an end of an attempt was."""

    NODE = "Node"
    """A failure of the machinery; its rate grows with the number of nodes."""
    JOB = "Job"
    """A failure of the program or of what it alone uses; as likely on one node as on many."""
    PREEMPTION = "Preemption"
    """Taken away for somebody else."""
    NONE = "None"
    """No failure: a normal end, a stop or a drain with notice, or an error that more saves cannot help."""


_CAUSES = {
    FaultKind.RANK_KILLED: Cause.NODE,
    FaultKind.LAUNCHER_LOST: Cause.NODE,
    FaultKind.WORKER_LOST: Cause.NODE,
    FaultKind.NETWORK: Cause.NODE,
    FaultKind.HANG: Cause.NODE,
    FaultKind.RANK_CRASHED: Cause.JOB,
    FaultKind.RANK_EXITED: Cause.JOB,
    FaultKind.USER_EXCEPTION: Cause.JOB,
}


class Kept(enum.StrEnum):
    """From where a job went on after a failure."""

    LIVE = "Live"
    """Last words kept the newest step."""
    SNAPSHOT = "Snapshot"
    """A snapshot in memory: up to one snapshot interval was lost."""
    STORAGE = "Storage"
    """A checkpoint: up to one checkpoint interval was lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Incident:
    """One end of an attempt that was running. `at` in seconds; `step` and `error` tell a bug that comes again."""

    at: float
    cause: Cause
    fault_class: str = ""
    """Class for the success of last words: name of the kind of fault."""
    step: int | None = None
    error: str = ""
    kept: Kept | None = None
    """None: nothing can be said, for example because the job had made no step yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What last words did in one class of faults: kept the newest step; if not, whether a snapshot was left."""

    live: rate.Share = dataclasses.field(default_factory=rate.Share)
    snapshot: rate.Share = dataclasses.field(default_factory=rate.Share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """All that is learned from failures; a plain value that is kept with the job or with its pool of nodes."""

    node: rate.Rate
    """Per hour of one node."""
    job: rate.Rate
    """Per hour of the job."""
    preemption: rate.Rate
    """Per hour of one node."""
    outcomes: dict[str, Outcomes] = dataclasses.field(default_factory=dict)
    """By class of fault."""
    at: float | None = None
    """When it was last brought up to date."""
    incident_at: float | None = None
    """Beginning of the newest incident; what belongs to it is merged with it."""
    stepped_since: bool = True
    """Whether the job has stepped since then."""
    bug: str = ""
    """Error and step of the newest failure of the program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Risk:
    """
    Failures per second of a job, by what they cost: `kept` none or one step, `snapshot` up to a snapshot interval,
    `storage` up to a checkpoint interval.
    """

    kept: float
    snapshot: float
    storage: float

    @property
    def total(self) -> float:
        """All failures per second."""
        return self.kept + self.snapshot + self.storage


def fresh(
    node: rate.Prior = rate.NODE_PRIOR, job: rate.Prior = rate.JOB_PRIOR, preemption: rate.Prior = rate.PREEMPTION_PRIOR
) -> Rates:
    """Nothing seen yet."""
    return Rates(node=rate.fresh(node), job=rate.fresh(job), preemption=rate.fresh(preemption))


def cause_of(fault: Fault) -> Cause:
    """
    Whether and as what a fault counts. Before the first step nothing counts, as no exposure is counted there either;
    a worker that was told to stop had notice; what cannot be fixed by going back (FATAL, NON_FINITE …) says nothing
    about saves.
    """
    if fault.before_first_step:
        return Cause.NONE
    return _CAUSES.get(fault.kind, Cause.NONE)


def stepped(rates: Rates, now: float, seconds: float, nodes: int) -> Rates:
    """All ranks on `nodes` nodes have stepped for `seconds` up to `now`. What is no time above 0 is not counted."""
    rates = _brought_up(rates, now)
    if not 0 < seconds < math.inf:
        return rates
    hours = seconds / 3600
    return dataclasses.replace(
        rates,
        node=rate.exposed(rates.node, hours * nodes),
        job=rate.exposed(rates.job, hours),
        preemption=rate.exposed(rates.preemption, hours * nodes),
        stepped_since=True,
    )


def struck(rates: Rates, incident: Incident, recovery_seconds: float = MOST_MERGE_SECONDS) -> Rates:
    """
    Learn from an incident. Not counted: what is no failure; what belongs to the incident before it, that is, came
    before a new step or within `recovery_seconds` (ten minutes at most) of its beginning; the same error at the same
    step again.
    """
    rates = _brought_up(rates, incident.at)
    if incident.cause is Cause.NONE:
        return rates
    if _merged(rates, incident, recovery_seconds):
        return rates
    bug = f"{incident.error} at step {incident.step}" if incident.cause is Cause.JOB and incident.error else ""
    repeated = bool(bug) and bug == rates.bug
    rates = dataclasses.replace(rates, incident_at=incident.at, stepped_since=False, bug=bug or rates.bug)
    if repeated:
        return rates
    outcomes = _learned(rates.outcomes, incident.fault_class, incident.kept)
    match incident.cause:
        case Cause.NODE:
            return dataclasses.replace(rates, node=rate.happened(rates.node), outcomes=outcomes)
        case Cause.JOB:
            return dataclasses.replace(rates, job=rate.happened(rates.job), outcomes=outcomes)
        case Cause.PREEMPTION:
            return dataclasses.replace(rates, preemption=rate.happened(rates.preemption), outcomes=outcomes)


def risk(rates: Rates, nodes: int, *, last_words: bool = True) -> Risk:
    """
    What a job on `nodes` nodes must expect: posterior means throughout, since the loss is linear in each of them. The
    share that last words lose is the mean over the classes seen, each with its own belief, plus one failure of a
    class not seen yet.
    """
    per_hour = nodes * (rates.node.mean + rates.preemption.mean) + rates.job.mean
    live, snapshot = _shares(rates.outcomes)
    live = live if last_words else 0.0
    total = per_hour / 3600
    return Risk(kept=total * live, snapshot=total * (1 - live) * snapshot, storage=total * (1 - live) * (1 - snapshot))


def _shares(outcomes: Mapping[str, Outcomes]) -> tuple[float, float]:
    """(share kept live, share of the others for which a snapshot was left)."""
    unseen = Outcomes()
    weights = [(1.0, unseen)]
    weights += [(one.live.successes + one.live.failures, one) for one in outcomes.values()]
    total = sum(weight for weight, _ in weights)
    lost = [(weight * (1 - one.live.mean), one) for weight, one in weights]
    lost_total = sum(weight for weight, _ in lost)
    return 1 - lost_total / total, sum(weight * one.snapshot.mean for weight, one in lost) / lost_total


def _merged(rates: Rates, incident: Incident, recovery_seconds: float) -> bool:
    if rates.incident_at is None:
        return False
    window = min(MOST_MERGE_SECONDS, max(0.0, recovery_seconds))
    return not rates.stepped_since or incident.at - rates.incident_at < window


def _learned(outcomes: dict[str, Outcomes], fault_class: str, kept: Kept | None) -> dict[str, Outcomes]:
    if kept is None:
        return outcomes
    known = outcomes.get(fault_class, Outcomes())
    live = _counted(known.live, kept is Kept.LIVE)
    snapshot = known.snapshot if kept is Kept.LIVE else _counted(known.snapshot, kept is Kept.SNAPSHOT)
    return {**outcomes, fault_class: Outcomes(live=live, snapshot=snapshot)}


def _counted(share: rate.Share, success: bool) -> rate.Share:
    return rate.Share(successes=share.successes + success, failures=share.failures + (not success))


def _brought_up(rates: Rates, now: float) -> Rates:
    """Let time pass: what was seen fades."""
    if rates.at is None or now <= rates.at:
        return rates if rates.at is not None else dataclasses.replace(rates, at=now)
    factor = rate.fading((now - rates.at) / 3600, HALF_LIFE_HOURS)
    return dataclasses.replace(
        rates,
        node=rate.faded(rates.node, factor),
        job=rate.faded(rates.job, factor),
        preemption=rate.faded(rates.preemption, factor),
        outcomes={
            name: Outcomes(live=rate.faded_share(one.live, factor), snapshot=rate.faded_share(one.snapshot, factor))
            for name, one in rates.outcomes.items()
        },
        at=now,
    )
