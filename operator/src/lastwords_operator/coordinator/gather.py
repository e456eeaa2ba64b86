"""Everything a pass may know, collected once, at its beginning."""

from __future__ import annotations

import dataclasses

from lastwords_operator.coordinator import ports
from lastwords_operator.coordinator.channel import Heard
from lastwords_operator.core import observation
from lastwords_operator.core.model import JobSpec, JobStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """One coordinator's time in office: what does not change between its passes."""

    spec: JobSpec
    epoch: int
    started_at: float


def gather(
    term: Term, status: JobStatus, now: float, links: ports.Links, workers: ports.Workers, stop_requested: str
) -> observation.Observation:
    """The observation of this moment."""
    heard = links.heard()
    containers = {row.worker: row for row in workers.containers()}
    return observation.Observation(
        now=now,
        spec=term.spec,
        status=status,
        workers=tuple(_view(w, heard.get(w), containers.get(w)) for w in range(term.spec.workers)),
        stop_requested=stop_requested,
        epoch=term.epoch,
        coordinator_started_at=term.started_at,
    )


def _view(worker: int, heard: Heard | None, containers: ports.Containers | None) -> observation.WorkerView:
    if containers is not None and heard is not None and heard.incarnation != containers.incarnation:
        heard = None  # it speaks of memory that is gone
    states = {}
    if containers is not None:
        for name, starts in containers.starts.items():
            if name in containers.pids:
                states[name] = observation.RUNNING
            elif starts:
                states[name] = observation.DEAD
    return observation.WorkerView(
        worker=worker,
        incarnation=containers.incarnation if containers is not None else "",
        connected=heard is not None and heard.connected,
        silent_seconds=heard.silent_seconds if heard is not None else 0.0,
        report=heard.report if heard is not None else None,
        containers=states,
    )
