"""How a job ends: through, stopped by its user, or failed. Nothing newer than storage is thrown away silently."""

from __future__ import annotations

from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import PersistOrder, RestoreSource
from lastwords_operator.core import breakdown, coverage, lastwords, plans, restore
from lastwords_operator.core.draft import Draft
from lastwords_operator.core.model import Copy, Fault, FaultKind, JobState, StopKind
from lastwords_operator.core.observation import Observation

READY_SECONDS = 5.0
"""Ranks that are through snapshot their last step by themselves; after so long it is copied by order."""


def finishing(draft: Draft) -> None:
    """All ranks are through: wait until their last step is committed."""
    ranks = draft.obs.ranks()
    steps = {rank.step for rank in ranks.values()}
    if steps == {None}:
        draft.event("Unprotected", "The script ended and had used no Checkpointer: nothing was saved", warning=True)
        _complete(draft, "the script ended")
        return
    if len(steps) > 1:
        shown = {number: rank.step for number, rank in sorted(ranks.items())}
        fault = Fault(
            kind=FaultKind.RANK_EXITED, infrastructure=False, message=f"The ranks ended at different steps: {shown}"
        )
        breakdown.begin(draft, fault)
        return
    step = next(iter(steps)) or 0
    plan = draft.status.restore
    ids = {CheckpointId(step=step, attempt=draft.status.attempt)}
    if plan is not None and plan.step == step:
        ids.add(CheckpointId(step=step, attempt=plan.attempt))
    if step == 0 or _committed(draft.obs, ids):
        if not _tail_goes_on(draft):
            _finished(draft, step)
        return
    if draft.status.persist_deadline is None:
        draft.set(persist_deadline=draft.now + draft.obs.spec.deadlines.finish)
    _order_last(draft, step)
    _await_commit(draft, step)


def _tail_goes_on(draft: Draft) -> bool:
    """Whether scripts still do what comes after their last step. They are waited for, but not without end."""
    busy = [number for number, rank in sorted(draft.obs.ranks().items()) if rank.in_tail]
    if not busy:
        return False
    if draft.status.tail_deadline is None:
        draft.set(tail_deadline=draft.now + draft.obs.spec.deadlines.tail)
    deadline, stop = draft.status.tail_deadline, draft.status.stop
    assert deadline is not None
    if stop is not None:
        deadline = min(deadline, stop.deadline)
    draft.wake(deadline)
    draft.say(f"all steps are saved; the scripts of ranks {busy} go on after them")
    if draft.now >= deadline:
        text = f"The scripts of ranks {busy} went on too long after their last step and are ended; all steps are saved"
        draft.event("TailCutOff", text, warning=True)
    return draft.now < deadline


def _finished(draft: Draft, step: int) -> None:
    stop, plan = draft.status.stop, draft.status.plan
    draft.set(progress_step=max(step, draft.status.progress_step), progress_at=draft.now)
    if stop is not None and stop.kind is StopKind.SUSPEND and plan.stop_after is not None and step >= plan.stop_after:
        _suspend(draft, f"stopped after step {step}: {stop.reason}")
    else:
        _complete(draft, f"all steps are made, step {step} is saved")


def _order_last(draft: Draft, step: int) -> None:
    """Have the last step persisted; copy it first where its snapshot is not there."""
    obs, attempt = draft.obs, draft.status.attempt
    table = restore.newest_table(obs)
    if table is None:
        return
    planned = restore.memory_plan(obs, table, step, attempt)
    if not isinstance(planned, str):
        draft.set(copy=None, persist=_persist_order(obs, step, attempt, "final"))
        return
    since = (draft.status.persist_deadline or draft.now) - obs.spec.deadlines.finish
    draft.wake(since + READY_SECONDS)
    if draft.status.copy is None and draft.now - since >= READY_SECONDS:
        done = frozenset().union(*restore.ready_parts(obs, table, step, attempt).values())
        writers = coverage.copy_writers(table, lastwords.still_at(obs, step), done)
        if writers:
            number = draft.status.copies + 1
            copy = Copy(number=number, step=step, deadline=draft.status.persist_deadline or draft.now, writers=writers)
            draft.set(copies=number, copy=copy)


def _await_commit(draft: Draft, step: int) -> None:
    deadline = draft.status.persist_deadline
    assert deadline is not None
    draft.wake(deadline)
    draft.say(f"all ranks are through; step {step} is being saved")
    if draft.now >= deadline:
        reason = f"Training ended at step {step}, but that step could not be saved: {_storage_error(draft.obs)}"
        if draft.status.stop is not None and draft.status.stop.kind is StopKind.SUSPEND:
            _keep_in_memory(draft, step)
            _suspend(draft, f"stopped after step {step}, which is in memory only: {_storage_error(draft.obs)}")
            return
        _keep_in_memory(draft, step)
        _fail(draft, reason)


def stopping(draft: Draft) -> None:
    """The user wants the job to stop: all ranks stop after one step; if they do not in time, they are held."""
    stop, plan = draft.status.stop, draft.status.plan
    assert stop is not None
    draft.wake(stop.deadline)
    if draft.now >= stop.deadline:
        fault = Fault(
            kind=FaultKind.WORKER_STOPPING, infrastructure=True,
            message=f"The ranks did not stop by themselves in time ({stop.reason})",
        )  # fmt: skip
        breakdown.begin(draft, fault, row=False)
    elif plan.stop_after is None:
        draft.set(plan=plans.stopping(draft.obs))
        draft.say(f"stopping after step {draft.status.plan.stop_after}: {stop.reason}")
    else:
        again = plans.adjusted(draft.obs)
        if again != plan:
            draft.set(plan=again)


def end(draft: Draft) -> None:
    """No rank runs any more and the job is to end: what is newer in memory than in storage goes to storage first."""
    obs, stop = draft.obs, draft.status.stop
    assert stop is not None
    settled = obs.coordinator_started_at + obs.spec.deadlines.reconnect
    if len(obs.reports()) < obs.spec.workers and draft.status.attempt > 0 and draft.now < settled:
        draft.wake(settled)
        draft.say("waiting for the workers to say what they hold")
        return
    choice = restore.choose(obs)
    plan = choice.plan
    if plan is None or plan.source is not RestoreSource.MEMORY:
        _ended(draft)
        return
    order = draft.status.persist
    if order is None or (order.step, order.attempt) != (plan.step, plan.attempt):
        order = _persist_order(obs, plan.step, plan.attempt, "last-words")
        draft.set(persist=order, persist_deadline=draft.now + obs.spec.last_words_timeout)
    if _committed(obs, {CheckpointId(step=plan.step, attempt=plan.attempt)}):
        _ended(draft)
        return
    deadline = draft.status.persist_deadline
    draft.wake(deadline)
    draft.say(f"saving step {plan.step} before the job ends")
    if deadline is not None and draft.now >= deadline:
        _keep_in_memory(draft, plan.step)
        _ended(draft)


def _ended(draft: Draft) -> None:
    stop = draft.status.stop
    assert stop is not None
    if stop.kind is StopKind.FAIL:
        _fail(draft, stop.reason)
    else:
        _suspend(draft, f"stopped: {stop.reason}")


def _keep_in_memory(draft: Draft, step: int) -> None:
    text = f"Step {step} is in the workers' memory only: {_storage_error(draft.obs)}"
    draft.set(kept_in_memory=True)
    draft.event("KeptInMemory", text, warning=True)


def suspended(draft: Draft) -> None:
    """Until nobody wants the job stopped any more."""
    if not draft.obs.stop_requested and not draft.obs.spec.suspend:
        draft.enter(
            JobState.PENDING,
            "resumed",
            stop=None,
            persist=None,
            persist_deadline=None,
            tail_deadline=None,
            last_words=None,
        )
        draft.event("Resumed", "The job goes on")


def _committed(obs: Observation, ids: set[CheckpointId]) -> bool:
    found = restore.checkpoints(obs)
    return any(id_ in found and not found[id_].rejected for id_ in ids)


def _persist_order(obs: Observation, step: int, attempt: int, kind: str) -> PersistOrder | None:
    table = restore.newest_table(obs)
    if table is None:
        return None
    ready = restore.ready_parts(obs, table, step, attempt)
    records, _ = restore.record_sources(obs, step, attempt)
    return PersistOrder(
        step=step, attempt=attempt, kind=kind,
        parts=tuple(sorted(frozenset().union(*ready.values()))), record_ranks=tuple(sorted(records)),
    )  # fmt: skip


def _storage_error(obs: Observation) -> str:
    errors = sorted({report.storage.error for report in obs.reports().values()} - {""})
    return "; ".join(errors) or "storage did not answer in time"


def _complete(draft: Draft, message: str) -> None:
    draft.condition("Progressing", False, "Complete")
    draft.condition("Complete", True, "AllSteps", message)
    draft.enter(JobState.COMPLETE, message, last_words=None, copy=None, persist=None)
    draft.event("Complete", message[:1].upper() + message[1:])


def _suspend(draft: Draft, message: str) -> None:
    draft.condition("Progressing", False, "Suspended")
    draft.enter(JobState.SUSPENDED, message, last_words=None, copy=None, persist=None)
    draft.event("Suspended", message[:1].upper() + message[1:])


def _fail(draft: Draft, message: str) -> None:
    draft.condition("Progressing", False, "Failed")
    draft.condition("Failed", True, "Failed", message)
    draft.enter(JobState.FAILED, message, last_words=None, copy=None, persist=None)
    draft.event("Failed", message, warning=True)
