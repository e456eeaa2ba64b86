"""From a fault to ranks that have ended: last words and recovering."""

from __future__ import annotations

import dataclasses

from lastwords.protocol.messages import RestoreSource
from lastwords_operator.core import ending, faults, lastwords, life, policy, restore
from lastwords_operator.core.draft import Draft
from lastwords_operator.core.model import (
    Copy,
    Excluded,
    Fault,
    FaultKind,
    JobState,
    LastWords,
    Recovery,
    Stop,
    StopKind,
)
from lastwords_operator.core.observation import Observation

MOST_TRACEBACK = 8000
"""Letters of a traceback that the status keeps: its end."""


_MAY_BE_PART_OF_MORE = (
    FaultKind.NETWORK, FaultKind.RANK_KILLED, FaultKind.RANK_EXITED, FaultKind.LAUNCHER_LOST,
)  # fmt: skip


def non_finite_again(obs: Observation) -> Fault | None:
    """The state blew up again where an earlier attempt blew up, after a restore from before that step."""
    status = obs.status
    before, begin = status.non_finite_step, status.restore.step if status.restore else 0
    if before is None or status.non_finite_attempt == status.attempt or begin >= before:
        return None
    bad = [
        part.step for report in obs.reports().values() for part in report.parts
        if not part.finite and part.attempt == status.attempt
    ]  # fmt: skip
    if not bad or abs(min(bad) - before) > max(1, status.plan.every_steps):
        return None
    return Fault(
        kind=FaultKind.NON_FINITE, infrastructure=False, step=min(bad),
        message=f"The state became NaN or infinite again at step {min(bad)}, as in attempt {status.non_finite_attempt}",
    )  # fmt: skip


def begin(draft: Draft, fault: Fault, *, row: bool = True) -> None:
    """A fault was found: hold everybody. `row` False: a planned stop that did not work out, no fault of anything."""
    obs, status = draft.obs, draft.status
    newest = lastwords.newest_step(obs)
    hang = fault.kind is FaultKind.HANG
    words = LastWords(
        fault=fault, began_at=draft.now, newest_step=newest,
        deadline=draft.now + obs.spec.last_words_timeout,
        hold_deadline=draft.now + min(lastwords.HOLD_SECONDS, obs.spec.last_words_timeout),
    )  # fmt: skip
    if row:
        draft.add_recovery(_row(obs, fault, draft.now))
        draft.event(fault.kind.value, fault.message, warning=True, worker=fault.worker, rank=fault.rank)
    draft.condition("Progressing", False, fault.kind.value, fault.message)
    if hang:
        draft.condition("Stalled", True, "Hang", fault.message)
    draft.enter(
        JobState.LAST_WORDS, fault.message, last_words=words, copy=None, persist=None,
        stacks=status.stacks + int(hang), progress_step=max(status.progress_step, newest),
    )  # fmt: skip


def _row(obs: Observation, fault: Fault, detected_at: float) -> Recovery:
    node = obs.view(fault.worker).node if fault.worker is not None else ""
    return Recovery(
        kind=fault.kind, message=fault.message, attempt=obs.status.attempt, worker=fault.worker, node=node,
        rank=fault.rank, infrastructure=fault.infrastructure, seconds_to_detect=fault.seconds_to_detect,
        detected_at=detected_at, exit_code=fault.exit_code, traceback=fault.traceback[-MOST_TRACEBACK:],
    )  # fmt: skip


def last_words(draft: Draft) -> None:
    """Hold, choose, copy; then the ranks may end."""
    words = draft.status.last_words
    assert words is not None
    _refine(draft)
    _finish_copy(draft)
    words = draft.status.last_words
    assert words is not None
    step = lastwords.next_step(draft.obs, words)
    match step:
        case lastwords.Wait(reason=reason, until=until):
            draft.wake(min(until, words.deadline))
            draft.say(f"{words.fault.message}; waiting: {reason}")
        case lastwords.Release(step=to):
            until = min(draft.now + lastwords.RELEASE_SECONDS, words.deadline)
            draft.set(last_words=dataclasses.replace(words, release_to=to, release_deadline=until))
        case lastwords.CopyParts(step=at, writers=writers):
            number = draft.status.copies + 1
            until = min(draft.now + lastwords.COPY_SECONDS, words.deadline)
            draft.set(copies=number, copy=Copy(number=number, step=at, deadline=until, writers=writers))
        case lastwords.Keep(choice=choice):
            _keep(draft, words, choice)


def _refine(draft: Draft) -> None:
    """A root that shows up later than its echoes takes their place; a hang gets its culprit from the stacks."""
    words = draft.status.last_words
    assert words is not None
    fault = words.fault
    found: Fault | None = fault
    if fault.kind is FaultKind.HANG:
        found = faults.with_culprit(draft.obs, fault)
    elif fault.kind in _MAY_BE_PART_OF_MORE:
        found = faults.find(draft.obs)
        worse = found is not None and (fault.kind is FaultKind.NETWORK or _contains(found, fault))
        found = found if worse and found is not None and found.kind is not FaultKind.HANG else fault
    if found is None or found == fault:
        return
    if fault.before_first_step != found.before_first_step:
        found = dataclasses.replace(found, before_first_step=fault.before_first_step)
    draft.set(last_words=dataclasses.replace(words, fault=found))
    row = _row(draft.obs, found, words.began_at)
    draft.recovery(
        kind=row.kind, message=row.message, worker=row.worker, node=row.node, rank=row.rank,
        infrastructure=row.infrastructure, exit_code=row.exit_code, traceback=row.traceback,
    )  # fmt: skip
    if (found.kind, found.rank, found.provisional) != (fault.kind, fault.rank, fault.provisional):
        draft.event(found.kind.value, found.message, warning=True, worker=found.worker, rank=found.rank)


def _contains(found: Fault, fault: Fault) -> bool:
    """Whether what was seen first is a part of what is seen now: a rank of a launcher, a launcher of a worker."""
    order = (FaultKind.LAUNCHER_LOST, FaultKind.WORKER_LOST)
    if found.kind not in order:
        return False
    return fault.kind not in order or (order.index(found.kind) > order.index(fault.kind))


def _finish_copy(draft: Draft) -> None:
    """The live copy is over when all its parts are there, or when a writer cannot go on."""
    copy, words, obs = draft.status.copy, draft.status.last_words, draft.obs
    if copy is None or words is None:
        return
    table = restore.newest_table(obs)
    ready = restore.ready_parts(obs, table, copy.step, draft.status.attempt) if table else {}
    absent = set(copy.writers) - set().union(*ready.values())
    if not absent:
        draft.set(copy=None)
        return
    able = set(lastwords.still_at(obs, copy.step))
    lost = sorted({copy.writers[part] for part in absent} - able)
    reports = obs.reports()
    topology = obs.spec.topology
    open_workers = {topology.worker_of(part) for part in absent}
    answered = all(w in reports and copy.number in reports[w].copied for w in open_workers)
    errors = [error for w in open_workers if w in reports and answered for error in reports[w].copy_errors]
    if lost:
        reason = f"ranks {lost} cannot copy any more"
    elif answered:
        reason = "; ".join(errors) or f"parts of ranks {sorted(absent)} did not become ready"
    elif draft.now >= copy.deadline:
        reason = f"parts of ranks {sorted(absent)} were not copied in time"
    else:
        return
    text = f"live copy of step {copy.step}: {reason}"
    # A writer that died may be replaced by another; a copy that failed with all writers alive would fail again.
    tried = words.tried if lost and not answered else (*words.tried, copy.step)
    draft.set(copy=None, last_words=dataclasses.replace(words, tried=tried, refusals=(*words.refusals, text)[-10:]))
    draft.event("LiveCopyFailed", text, warning=True)


def _keep(draft: Draft, words: LastWords, choice: restore.Choice) -> None:
    kept = choice.source
    step = kept.step if kept else 0
    lost = max(0, words.newest_step - step)
    words = dataclasses.replace(words, kept=kept, refusals=choice.rejected[-10:])
    draft.set(last_words=words)
    draft.recovery(
        kept_at=draft.now, step=step, steps_lost=lost,
        source=kept.source if kept else RestoreSource.BEGINNING, exact=kept.exact if kept else True,
    )  # fmt: skip
    if kept is None:
        text = "Nothing to keep: no step was made" if not words.newest_step else "No state could be kept"
    else:
        text = f"Kept step {kept.step} from {kept.source.value}, {lost} steps lost"
        if choice.rejected and lost:
            text += f" ({choice.rejected[0]})"
    draft.event("LastWords", text, warning=kept is None and words.newest_step > 0)
    _judge(draft, words)


def _judge(draft: Draft, words: LastWords) -> None:
    fault = words.fault
    if draft.status.stop is not None:
        stop_ranks(draft, draft.status.stop.reason)
        return
    if fault.kind is FaultKind.RESTORE_FAILED and draft.status.restore is not None:
        plan = draft.status.restore
        row = Excluded(source=plan.source, step=plan.step, attempt=plan.attempt, reason=fault.message)
        draft.set(excluded=(*draft.status.excluded, row)[-20:])
    verdict = policy.judge(draft.obs.spec.policy, draft.status, fault, draft.now)
    draft.put(verdict.status)
    if verdict.fail:
        fail(draft, verdict.fail + (f"\n{fault.traceback}" if fault.traceback else ""))
    stop_ranks(draft, fault.message)


def fail(draft: Draft, message: str) -> None:
    """The job will fail, once what it has is kept."""
    if draft.status.stop is None or draft.status.stop.kind is not StopKind.FAIL:
        deadline = draft.now + draft.obs.spec.last_words_timeout
        draft.set(stop=Stop(kind=StopKind.FAIL, reason=message, deadline=deadline))


def stop_ranks(draft: Draft, message: str) -> None:
    """End all ranks of the attempt."""
    if any(item.type == "Stalled" and item.status for item in draft.status.conditions):
        draft.condition("Stalled", False, "Recovering")
    draft.enter(
        JobState.RECOVERING, message, stop_order=draft.status.order_number + 1, copy=None, persist=None,
        persist_deadline=None,
        tail_deadline=None,
    )  # fmt: skip


def recovering(draft: Draft) -> None:
    """Until no rank is left on the workers that can be heard; the others are waited for by gathering."""
    obs = draft.obs
    running = [w for w, report in obs.reports().items() if not life.stopped(obs, report)]
    if running:
        draft.say(f"ending the ranks of workers {running}")
        draft.wake(draft.status.state_since + obs.spec.deadlines.gather)
        if draft.now - draft.status.state_since < obs.spec.deadlines.gather:
            return
    draft.recovery(stopped_at=draft.now)
    if draft.status.stop is not None:
        ending.end(draft)
        return
    draft.enter(JobState.GATHERING, "waiting for the workers")
