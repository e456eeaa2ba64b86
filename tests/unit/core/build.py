"""Short ways to write observations for tables of cases."""

from __future__ import annotations

import dataclasses
from typing import Any

from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import (
    AgentReport,
    CheckpointInfo,
    PartHolding,
    RankReport,
    RankState,
    RecordHolding,
    RestorePlan,
    RestoreSource,
    RunState,
    StorageReport,
)
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords_operator.core.model import JobSpec, JobState, JobStatus
from lastwords_operator.core.observation import Observation, WorkerView
from tests.unit.core.sim_world import ddp_table

NOW = 1000.0


def spec(workers: int = 2, procs: int = 2, **fields: Any) -> JobSpec:
    return JobSpec(name="job", workers=workers, processes_per_worker=procs, **fields)


def status(state: JobState = JobState.RUNNING, attempt: int = 1, **fields: Any) -> JobStatus:
    """A job whose attempt began at step 0."""
    values: dict[str, Any] = {
        "lineage": (LineageEntry(attempt=1, step=0, parent=0),),
        "restore": RestorePlan(source=RestoreSource.BEGINNING), "stable_since": 5.0,
        "progress_step": 5, "progress_at": NOW,
    }  # fmt: skip
    return JobStatus(state=state, attempt=attempt, **(values | fields))


def stop_plan(step: int) -> SnapshotPlan:
    """All ranks stop after `step`."""
    return SnapshotPlan(number=2, every_steps=5, from_step=step, stop_after=step)


def rank(number: int, **fields: Any) -> RankReport:
    """A rank that trains at step 10."""
    values: dict[str, Any] = {
        "state": RankState.RUNNING, "step": 10, "phase": "training", "step_seconds": 0.5, "quiet_seconds": 0.2,
        "first_step_age_seconds": 5.0, "restored_age_seconds": 6.0,
    }  # fmt: skip
    return RankReport(rank=number, **(values | fields))


def part(number: int, step: int, attempt: int = 1, slot: int = 0, *, finite: bool = True) -> PartHolding:
    return PartHolding(rank=number, slot=slot, step=step, attempt=attempt, generation=1, finite=finite)


def record(number: int, step: int, attempt: int = 1, **fields: Any) -> RecordHolding:
    return RecordHolding(rank=number, step=step, attempt=attempt, **fields)


def checkpoint(step: int, attempt: int = 1, **fields: Any) -> CheckpointInfo:
    return CheckpointInfo(id=CheckpointId(step=step, attempt=attempt), **fields)


def report(job: JobSpec, worker: int, **fields: Any) -> AgentReport:
    """A worker whose ranks train in attempt 1."""
    values: dict[str, Any] = {
        "attempt": 1, "run": RunState.RUNNING, "launcher": True, "epoch_seen": 1, "order_seen": 1,
        "ranks": tuple(rank(n) for n in job.topology.ranks_of(worker)),
        "table": ddp_table(job.topology), "layout_attempt": 1,
        "fetch_address": f"10.0.0.{worker}:1", "storage": StorageReport(loaded=True),
    }  # fmt: skip
    return AgentReport(worker=worker, incarnation=f"w{worker}", agent_run=f"a{worker}", **(values | fields))


def observe(job: JobSpec, status_: JobStatus, reports: list[AgentReport | None], **fields: Any) -> Observation:
    """All workers that have a report are connected."""
    views = tuple(
        WorkerView(worker=w, incarnation=f"w{w}", connected=found is not None, report=found)
        for w, found in enumerate(reports)
    )
    values: dict[str, Any] = {"now": NOW, "epoch": 1, "coordinator_started_at": 0.0}
    return Observation(spec=job, status=status_, workers=views, **(values | fields))


def job_with(job: JobSpec, *ranks: RankReport, status_: JobStatus | None = None, **fields: Any) -> Observation:
    """A running job in which these ranks differ from ones that train."""
    changed = {item.rank: item for item in ranks}
    reports: list[AgentReport | None] = [
        report(job, w, ranks=tuple(changed.get(n, rank(n)) for n in job.topology.ranks_of(w)), **fields)
        for w in range(job.workers)
    ]
    return observe(job, status_ or status(), reports)


def changed(seen: Observation, **fields: Any) -> Observation:
    return dataclasses.replace(seen, **fields)
