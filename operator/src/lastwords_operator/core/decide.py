"""
`decide(observation) -> Decision`: what to do about a job, in one pure function.

Level-triggered: it looks at what is and orders what should be; deciding again on the decided status changes nothing.
"""

from __future__ import annotations

import dataclasses

from lastwords_operator.core import breakdown, ending, faults, life, orders
from lastwords_operator.core.draft import Draft
from lastwords_operator.core.model import JobState, JobStatus, StopKind
from lastwords_operator.core.observation import Action, Decision, EnsureWorker, Observation, ReplaceWorker

_MOST_TRANSITIONS = 30

_STATES = {
    JobState.PENDING: life.pending,
    JobState.GATHERING: life.gathering,
    JobState.STARTING: life.starting,
    JobState.RUNNING: life.running,
    JobState.LAST_WORDS: breakdown.last_words,
    JobState.RECOVERING: breakdown.recovering,
    JobState.SUSPENDED: ending.suspended,
}


def decide(observation: Observation) -> Decision:
    """The decision for one job. Raises nothing for any observation; same input, same output."""
    draft = Draft(observation)
    for _ in range(_MOST_TRANSITIONS):
        before = draft.status
        draft.wake_times.clear()
        if not before.state.over:
            life.common(draft)
            _STATES[draft.status.state](draft)
        if draft.status == before:
            break
    status, ordered = orders.build(draft.obs)
    actions = _actions(draft)
    return Decision(
        status=status,
        orders=ordered,
        actions=actions,
        events=tuple(draft.events),
        wake_at=min(draft.wake_times, default=None),
        reason=f"{status.state.value}: {status.message}",
    )


def resumed(status: JobStatus) -> JobStatus:
    """
    The status of a job that ended and that its user starts again: with its past, and the whole budget.

    For a job that is Failed or Suspended; any other is returned as it is.
    """
    if status.state not in (JobState.FAILED, JobState.SUSPENDED):
        return status
    return dataclasses.replace(
        status,
        state=JobState.PENDING, message="started again", stop=None, last_words=None, copy=None, persist=None,
        persist_deadline=None, tail_deadline=None, back_off_until=None, last_error=None, restarts=0,
        restarts_without_progress=0, startup_failures=0,
        kept_in_memory=False, suspicions={}, excluded=(), non_finite_step=None, notices=(),
    )  # fmt: skip


def _actions(draft: Draft) -> tuple[Action, ...]:
    status = draft.status
    if status.state.over or status.state is JobState.SUSPENDED:
        return ()
    if status.stop is not None and status.stop.kind is StopKind.FAIL and status.attempt == 0:
        return ()
    actions: list[Action] = [EnsureWorker(worker=worker) for worker in range(draft.obs.spec.workers)]
    limit = draft.obs.spec.deadlines.gather
    for worker in range(draft.obs.spec.workers):
        incarnation = draft.obs.view(worker).incarnation
        if not incarnation or status.stop is not None:
            continue
        late = faults.lasted(draft.obs, life.late_key(worker, incarnation), limit)
        asked = life.asked_to_stop(draft.obs, worker)
        if late or asked:
            reason = asked or f"it did not get ready within {limit:.0f} s"
            actions.append(ReplaceWorker(worker=worker, incarnation=incarnation, reason=reason))
    return tuple(actions)
