"""What each worker should be doing: a pure function of status and observation, numbered so that a repeat is one."""

from __future__ import annotations

import dataclasses
import hashlib

from lastwords.protocol import codec
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import LiveCopy, RestoreSource, RunState, WorkerOrder
from lastwords_operator.core.model import JobState, JobStatus
from lastwords_operator.core.observation import Observation

KILL_GRACE_SECONDS = 5.0
"""For ranks that end because the job does; after a fault they are killed at once."""


def build(observation: Observation) -> tuple[JobStatus, dict[int, WorkerOrder]]:
    """
    The status with the number of these orders, and the orders by worker.

    The number grows when the content of any of them changes, and only then.
    """
    status = observation.status
    drafts = {worker: _order(observation, worker) for worker in range(observation.spec.workers)}
    digest = hashlib.sha256(codec.dumps(tuple(drafts.values()))).hexdigest()[:32]
    if digest != status.order_digest:
        status = dataclasses.replace(status, order_number=status.order_number + 1, order_digest=digest)
    numbered = {
        worker: dataclasses.replace(order, epoch=observation.epoch, number=status.order_number)
        for worker, order in drafts.items()
    }
    return status, numbered


def run_state(status: JobStatus) -> RunState:
    """What the ranks should do in this state."""
    if status.state.ranks_run:
        return RunState.RUNNING
    ended = status.state in (JobState.COMPLETE, JobState.FAILED, JobState.SUSPENDED)
    return RunState.ENDED if ended else RunState.STOPPED


def store_address(observation: Observation) -> str:
    """Where the attempt's TCPStore is, once worker 0 knows."""
    report = observation.report(0)
    if report is None or report.attempt != observation.status.attempt or not observation.status.state.ranks_run:
        return ""
    return report.store_address


def _order(observation: Observation, worker: int) -> WorkerOrder:
    status, spec = observation.status, observation.spec
    words = status.last_words if status.state is JobState.LAST_WORDS else None
    report = observation.report(worker)
    release = status.releases.get(worker)
    same_run = release is not None and report is not None and release.agent_run == report.agent_run
    peers = {peer: report.fetch_address for peer, report in sorted(observation.reports().items())}
    running = status.state.ranks_run
    return WorkerOrder(
        epoch=0,
        number=0,
        attempt=status.attempt,
        run=run_state(status),
        topology=spec.topology,
        lineage=status.lineage,
        restore=status.restore if running else None,
        peers={peer: address for peer, address in peers.items() if address},
        store_address=store_address(observation),
        hold=words is not None,
        release_hold=release.count if release and same_run else 0,
        release_to=words.release_to if words else None,
        live_copy=_live_copy(observation, worker),
        stacks=status.stacks,
        persist=status.persist,
        plan=status.plan if running else None,
        replicas=spec.replicas,
        keep_last=spec.keep_last,
        keep_every=spec.keep_every,
        in_use=_in_use(status),
        kill_grace_seconds=0.0 if running or not status.stop else KILL_GRACE_SECONDS,
    )


def _live_copy(observation: Observation, worker: int) -> LiveCopy | None:
    copy = observation.status.copy
    if copy is None:
        return None
    own = set(observation.spec.topology.ranks_of(worker))
    return LiveCopy(
        number=copy.number, step=copy.step, writers={part: rank for part, rank in copy.writers.items() if part in own}
    )


def _in_use(status: JobStatus) -> tuple[CheckpointId, ...]:
    """The checkpoint that an attempt was started from, until every rank has made a new step."""
    plan = status.restore
    if plan is None or plan.source is not RestoreSource.CHECKPOINT or status.stable_since is not None:
        return ()
    return (CheckpointId(step=plan.step, attempt=plan.attempt),)
