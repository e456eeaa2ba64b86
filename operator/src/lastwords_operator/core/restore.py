"""
From which state an attempt goes on: the newest one that memory or storage can give, and where each rank gets it.

Never a state off the lineage, never one with NaN, and never the beginning of a job that had made progress,
unless its specification permits that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lastwords.protocol import lineage
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import CheckpointInfo, RestorePlan, RestoreSource
from lastwords.protocol.pieces import TableSummary
from lastwords_operator.core import coverage
from lastwords_operator.core.model import JobStatus, Source
from lastwords_operator.core.observation import Observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """`plan` None: nothing can be used. `rejected`: in words, what was not taken and why."""

    plan: RestorePlan | None
    rejected: tuple[str, ...] = ()

    @property
    def source(self) -> Source | None:
        """The plan without its details."""
        plan = self.plan
        if plan is None or plan.source is RestoreSource.BEGINNING:
            return None
        return Source(source=plan.source, step=plan.step, attempt=plan.attempt, exact=plan.exact)


def newest_table(observation: Observation) -> TableSummary | None:
    """The piece table in force; None when no worker has one that fits the job's workers and ranks."""
    found = [
        (report.layout_attempt, report.table.generation, -worker, report.table)
        for worker, report in observation.reports().items()
        if report.table is not None and report.table.topology == observation.spec.topology
    ]
    return max(found, key=lambda item: item[:3])[3] if found else None


def on_path(status: JobStatus, step: int, attempt: int) -> bool:
    """Whether a state is of this job's past. A job that never started has none: everything found is its own."""
    return not status.lineage or lineage.is_valid_source(status.lineage, step, attempt)


def ready_parts(observation: Observation, table: TableSummary, step: int, attempt: int) -> dict[int, frozenset[int]]:
    """Worker -> ranks whose parts of (step, attempt) stand ready and finite in its memory."""
    return {
        worker: frozenset(
            part.rank
            for part in report.parts
            if (part.step, part.attempt, part.generation) == (step, attempt, table.generation) and part.finite
        )
        for worker, report in observation.reports().items()
    }


def record_sources(observation: Observation, step: int, attempt: int) -> tuple[dict[int, int], bool]:
    """
    Where the small record of each rank is: rank -> worker, and whether any of them is a final one.

    Final before provisional, a rank's own worker before its neighbour.
    """
    best: dict[int, tuple[bool, bool, int]] = {}
    for worker, report in observation.reports().items():
        for record in report.records:
            if (record.step, record.attempt) != (step, attempt):
                continue
            row = (record.provisional, worker != observation.spec.topology.worker_of(record.rank), worker)
            best[record.rank] = min(best.get(record.rank, row), row)
    return {rank: row[2] for rank, row in best.items()}, any(not row[0] for row in best.values())


def memory_plan(
    observation: Observation,
    table: TableSummary,
    step: int,
    attempt: int,
    *,
    copied: Iterable[int] = (),
    recorded: Iterable[int] = (),
) -> RestorePlan | str:
    """
    How (step, attempt) can be restored from memory, or why it cannot. `copied`: parts that a live copy would add;
    `recorded`: ranks that will have a final record of their own.
    """
    topology = table.topology
    ready = {worker: set(ranks) for worker, ranks in ready_parts(observation, table, step, attempt).items()}
    for rank in copied:
        ready.setdefault(topology.worker_of(rank), set()).add(rank)
    parts, missing = coverage.part_sources(table, ready)
    if missing:
        return f"memory, step {step}: the parts of ranks {list(missing)} are nowhere"
    records, final = record_sources(observation, step, attempt)
    for rank in recorded:
        records[rank] = topology.worker_of(rank)
        final = True
    if not final:
        return f"memory, step {step}: no rank has a whole record of it"
    exact = set(records) >= set(range(topology.world))
    return RestorePlan(
        source=RestoreSource.MEMORY, step=step, attempt=attempt, parts=parts,
        records=dict(sorted(records.items())), exact=exact,
    )  # fmt: skip


def checkpoints(observation: Observation) -> dict[CheckpointId, CheckpointInfo]:
    """All checkpoints that any worker found; one that a worker rejects is rejected."""
    found: dict[CheckpointId, CheckpointInfo] = {}
    for report in observation.reports().values():
        for info in report.storage.checkpoints:
            known = found.get(info.id)
            if known is None or (info.rejected and not known.rejected):
                found[info.id] = info
    return found


def highest_attempt(observation: Observation) -> int:
    """The highest attempt number found anywhere: the next one must be above it."""
    highest = observation.status.attempt
    for report in observation.reports().values():
        numbers = [report.attempt, report.layout_attempt]
        numbers += [part.attempt for part in report.parts]
        numbers += [record.attempt for record in report.records]
        numbers += [info.id.attempt for info in report.storage.checkpoints]
        highest = max(highest, *numbers)
    return highest


def choose(observation: Observation) -> Choice:
    """The newest usable state, memory before storage at equal steps, with a record for every rank where possible."""
    memory, rejected = memory_plans(observation)
    return pick(observation, memory, rejected)


def pick(observation: Observation, memory: Iterable[RestorePlan], rejected: Iterable[str] = ()) -> Choice:
    """The best of the given memory plans, the checkpoints and the beginning."""
    plans = list(memory)
    if any(plan.exact for plan in plans):
        plans = [plan for plan in plans if plan.exact]
    stored, refused = _checkpoint_plans(observation)
    reasons = (*rejected, *refused)
    status = observation.status
    candidates = [*plans, *stored]
    if candidates:
        return Choice(plan=max(candidates, key=lambda plan: _rank_of(status, plan)), rejected=reasons)
    # Steps alone are no reason to wait: before the first whole snapshot there is nothing that could be brought back.
    progress = status.was_saved or bool(refused) or bool(status.excluded)
    if not progress or observation.spec.allow_beginning:
        return Choice(plan=RestorePlan(source=RestoreSource.BEGINNING), rejected=reasons)
    return Choice(plan=None, rejected=reasons or ("nothing is left in memory or storage",))


def _rank_of(status: JobStatus, plan: RestorePlan) -> tuple[int, int, int]:
    memory = int(plan.source is RestoreSource.MEMORY)
    if status.lineage:
        return plan.step, memory, plan.attempt
    # Without a history the highest attempt is the newest; a higher step of an older one may be of a path left long ago.
    return plan.attempt, plan.step, memory


def _excluded(status: JobStatus, source: RestoreSource, step: int, attempt: int) -> str:
    """
    Why a source that was chosen before is not chosen again. A checkpoint gets one chance; memory gets two, since the
    worker that found its part damaged throws it away, and another one may have it.
    """
    rows = [row for row in status.excluded if (row.source, row.step, row.attempt) == (source, step, attempt)]
    chances = 2 if source is RestoreSource.MEMORY else 1
    return rows[-1].reason if len(rows) >= chances else ""


def memory_plans(observation: Observation) -> tuple[list[RestorePlan], list[str]]:
    """What the ready parts in memory can give, newest first, and what they cannot."""
    table = newest_table(observation)
    holdings = {
        (part.step, part.attempt): part.finite for report in observation.reports().values() for part in report.parts
    }
    for report in observation.reports().values():
        for part in report.parts:
            holdings[part.step, part.attempt] &= part.finite
    plans, rejected = [], []
    for (step, attempt), finite in sorted(holdings.items(), reverse=True):
        if not finite:
            rejected.append(f"memory, step {step}: the state holds NaN or infinity")
        elif not on_path(observation.status, step, attempt):
            rejected.append(f"memory, step {step} of attempt {attempt}: not on the path the job took")
        elif reason := _excluded(observation.status, RestoreSource.MEMORY, step, attempt):
            rejected.append(f"memory, step {step}: {reason}")
        elif table is None:
            rejected.append(f"memory, step {step}: no worker has a layout for {observation.spec.workers} workers")
        else:
            plan = memory_plan(observation, table, step, attempt)
            if isinstance(plan, str):
                rejected.append(plan)
            else:
                plans.append(plan)
    return plans, rejected


def _checkpoint_plans(observation: Observation) -> tuple[list[RestorePlan], list[str]]:
    plans, rejected = [], []
    for found, info in sorted(checkpoints(observation).items(), reverse=True):
        name = f"checkpoint of step {found.step}, attempt {found.attempt}"
        if info.rejected:
            rejected.append(f"{name}: {info.rejected}")
        elif not info.finite:
            rejected.append(f"{name}: the state holds NaN or infinity")
        elif not on_path(observation.status, found.step, found.attempt):
            rejected.append(f"{name}: not on the path the job took")
        elif reason := _excluded(observation.status, RestoreSource.CHECKPOINT, found.step, found.attempt):
            rejected.append(f"{name}: {reason}")
        else:
            plans.append(RestorePlan(source=RestoreSource.CHECKPOINT, step=found.step, attempt=found.attempt))
    return plans, rejected
