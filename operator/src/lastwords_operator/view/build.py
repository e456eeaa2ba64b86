"""From what the coordinator knows to what is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lastwords.protocol.messages import AgentReport, RankReport
from lastwords_operator.coordinator import ports
from lastwords_operator.core.life import WARM_START
from lastwords_operator.core.model import FaultKind, JobState, JobStatus, Recovery
from lastwords_operator.core.observation import AGENT, TRAINER, Observation
from lastwords_operator.core.observation import WorkerView as Seen
from lastwords_operator.view.model import EventView, JobView, RankView, RecoveryView, WorkerView

EVENTS_SHOWN = 30
_WORDS = {
    FaultKind.RANK_KILLED: "rank killed",
    FaultKind.RANK_CRASHED: "rank crashed",
    FaultKind.RANK_EXITED: "rank exited",
    FaultKind.USER_EXCEPTION: "exception",
    FaultKind.LAUNCHER_LOST: "launcher died",
    FaultKind.WORKER_LOST: "worker lost",
    FaultKind.WORKER_STOPPING: "worker told to stop",
    FaultKind.NETWORK: "network",
    FaultKind.HANG: "hang",
    FaultKind.START_TIMEOUT: "start took too long",
    FaultKind.RESTORE_FAILED: "restore failed",
    FaultKind.FATAL: "fatal",
    FaultKind.NON_FINITE: "NaN or infinity",
}


def job_view(
    seen: Observation,
    status: JobStatus,
    containers: Iterable[ports.Containers],
    *,
    folder: str,
    started_at: float,
    events: Sequence[Mapping[str, Any]],
) -> JobView:
    """The picture of one pass; `status` is the one it decided on."""
    rows = {row.worker: row for row in containers}
    reports = [view.report for view in seen.workers if view.report is not None]
    ranks = [rank for report in reports if report.attempt == status.attempt for rank in report.ranks]
    steps = [rank.step for rank in ranks if rank.step is not None]
    everyone = len(steps) == seen.spec.topology.world
    errors = [report.storage.error for report in reports if report.storage.error]
    return JobView(
        name=seen.spec.name,
        folder=folder,
        at=seen.now,
        state=status.state.value,
        reason=status.message,
        attempt=status.attempt,
        started_at=started_at,
        step=max(min(steps), status.progress_step) if everyone else status.progress_step,
        loss=next((rank.loss for rank in ranks if rank.loss is not None), None),
        snapshot_step=_snapshot_step(reports, seen.spec.topology.world),
        checkpoint_step=status.newest_checkpoint,
        storage_error=errors[0] if errors else "",
        cold_start=next((row.message for row in status.conditions if row.type == WARM_START and not row.status), ""),
        workers=tuple(_worker(view, rows.get(view.worker)) for view in seen.workers),
        recoveries=tuple(recovery_view(number, row) for number, row in enumerate(status.recoveries, 1)),
        events=tuple(event_view(row) for row in events[-EVENTS_SHOWN:]),
        traceback=status.recoveries[-1].traceback if status.recoveries and status.state is JobState.FAILED else "",
    )


def _snapshot_step(reports: Iterable[AgentReport], world: int) -> int | None:
    """Newest step of which the parts of all ranks are READY."""
    parts: dict[tuple[int, int], set[int]] = {}
    for report in reports:
        for part in report.parts:
            parts.setdefault((part.step, part.attempt), set()).add(part.rank)
    return max((step for (step, _), ranks in parts.items() if len(ranks) == world), default=None)


def _worker(view: Seen, row: ports.Containers | None) -> WorkerView:
    pids = row.pids if row is not None else {}
    starts = row.starts if row is not None else {}
    return WorkerView(
        worker=view.worker,
        agent_pid=pids.get(AGENT, 0),
        launcher_pid=pids.get(TRAINER, 0),
        agent_restarts=max(0, starts.get(AGENT, 0) - 1),
        launcher_restarts=max(0, starts.get(TRAINER, 0) - 1),
        connected=view.connected,
        silent_seconds=view.silent_seconds,
        ranks=tuple(_rank(rank) for rank in view.report.ranks) if view.report is not None else (),
    )


def _rank(rank: RankReport) -> RankView:
    return RankView(
        rank=rank.rank,
        state=rank.state.value,
        step=rank.step,
        loss=rank.loss,
        phase=rank.phase or "",
        quiet_seconds=rank.quiet_seconds,
        held=rank.held,
    )


def recovery_view(number: int, row: Recovery) -> RecoveryView:
    """One row of `status.recoveries` with its times counted from the fault."""
    began = row.detected_at - row.seconds_to_detect
    times = [("noticed", row.detected_at), ("kept", row.kept_at), ("stopped", row.stopped_at)]
    times += [("restarted", row.started_at), ("restored", row.restored_at), ("first new step", row.first_step_at)]
    who = f" of rank {row.rank}" if row.rank is not None else ""
    if not who and row.worker is not None:
        who = f" of worker {row.worker}"
    return RecoveryView(
        number=number,
        fault=f"{_WORDS[row.kind]}{who}",
        at=began,
        source=row.source.value if row.source is not None else "",
        step=row.step,
        steps_lost=row.steps_lost,
        exact=row.exact is not False,
        phases=tuple((name, 1000 * (at - began)) for name, at in times if at is not None),
        done=row.first_step_at is not None,
    )


def event_view(row: Mapping[str, Any]) -> EventView:
    """One line of events.jsonl."""
    return EventView(
        at=float(row.get("at", 0.0)),
        kind=str(row.get("reason", "")),
        text=str(row.get("message", "")),
        warning=bool(row.get("warning", False)),
    )
