"""The undisturbed part of a job's life: pending, gathering, starting, running."""

from __future__ import annotations

import dataclasses

from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.messages import AgentReport, RankState, RestorePlan, RestoreSource, RunState, StorageReport
from lastwords_operator.core import breakdown, ending, faults, plans, policy, restore
from lastwords_operator.core.draft import Draft
from lastwords_operator.core.model import HoldRelease, JobState, Stop, StopKind
from lastwords_operator.core.observation import Observation

MOST_LINEAGE = 100
PROGRESS_SECONDS = 10.0
"""How often the status follows the steps, at most."""
SLOW_SAVE_SECONDS = 60.0
SLOW_SAVE_TIMES = 3.0
"""A save that takes longer than a minute, and so many times as long as the last one, is told."""
WARM_START = "WarmStart"
"""Condition; False where each restart starts processes anew, with the reason."""
COLD_CODES = {"wrapped": "Wrapped", "cold-starts": "NotForked"}
"""Notices that say so: the condition's reason."""
SPURIOUS_HOLD_SECONDS = 2.0
"""A worker that held itself and shows no fault for so long is released."""


def common(draft: Draft) -> None:
    """What is looked at in every state."""
    draft.set(suspicions={**faults.suspicions(draft.obs), **_late(draft.obs)})
    _announce(draft)
    _checkpoints(draft)
    reason = draft.obs.stop_requested or ("the job is suspended" if draft.obs.spec.suspend else "")
    if reason and draft.status.stop is None and draft.status.state is not JobState.SUSPENDED:
        seconds = plans.step_seconds(draft.obs) or 0.0
        deadline = draft.now + draft.obs.spec.last_words_timeout + 3 * seconds
        draft.set(stop=Stop(kind=StopKind.SUSPEND, reason=reason, deadline=deadline))
        draft.event("Stopping", f"The job is being stopped: {reason}")


def _announce(draft: Draft) -> None:
    known = set(draft.status.notices)
    for worker, report in draft.obs.reports().items():
        for notice in report.notices:
            key = f"{notice.code}:{notice.rank}"
            if key not in known:
                known.add(key)
                draft.event(notice.code, notice.text, warning=notice.fatal, worker=worker, rank=notice.rank)
            if notice.code in COLD_CODES:
                draft.condition(WARM_START, False, COLD_CODES[notice.code], notice.text)
    draft.set(notices=tuple(sorted(known))[-200:])


def _checkpoints(draft: Draft) -> None:
    """How saving goes, and the first time that the state is not finite."""
    status, obs = draft.status, draft.obs
    good = [
        info.id.step for info in restore.checkpoints(obs).values()
        if not info.rejected and info.finite and restore.on_path(status, info.id.step, info.id.attempt)
    ]  # fmt: skip
    if good:
        draft.set(newest_checkpoint=max(good), was_saved=True)
    elif not status.was_saved and restore.memory_plans(obs)[0]:
        draft.set(was_saved=True)
    broken = [report.storage for report in obs.reports().values() if report.storage.failures_in_row]
    bad = [
        part.step for report in obs.reports().values() for part in report.parts
        if not part.finite and part.attempt == status.attempt
    ]  # fmt: skip
    if bad and (status.non_finite_step is None or _repeats(draft.obs) or min(bad) < status.non_finite_step):
        if not _repeats(draft.obs):
            draft.set(non_finite_step=min(bad), non_finite_attempt=status.attempt)
        text = f"The state holds NaN or infinity at step {min(bad)}; snapshots of it are no source of a restart"
        if draft.condition("CheckpointHealthy", False, "NonFinite", text):
            draft.event("NonFiniteState", text, warning=True)
    elif bad:
        return
    elif broken:
        worst = max(broken, key=lambda storage: storage.failures_in_row)
        text = f"The last {worst.failures_in_row} saves failed: {worst.error}. Training goes on"
        if draft.condition("CheckpointHealthy", False, "SaveFailed", text):
            draft.event("SaveFailed", text, warning=True)
    elif slow := [report.storage for report in obs.reports().values() if _is_slow(report.storage)]:
        worst = max(slow, key=lambda storage: storage.persisting_seconds)
        step = worst.persisting.step if worst.persisting is not None else 0
        minutes = int(worst.persisting_seconds // 60)
        text = f"The save of step {step} has been going on for over {minutes} min. Training goes on"
        if draft.condition("CheckpointHealthy", False, "SaveSlow", text):
            draft.event("SaveSlow", text, warning=True)
    elif obs.reports():
        draft.condition("CheckpointHealthy", True, "Saving")


def _is_slow(storage: StorageReport) -> bool:
    return storage.persisting_seconds > max(SLOW_SAVE_SECONDS, SLOW_SAVE_TIMES * storage.commit_seconds_last)


def _repeats(obs: Observation) -> bool:
    return breakdown.non_finite_again(obs) is not None


# --- gathering --------------------------------------------------------------------------------------


def pending(draft: Draft) -> None:
    """The beginning."""
    draft.enter(JobState.GATHERING, "waiting for the workers", stop_order=draft.status.order_number + 1)
    draft.event("Gathering", f"Waiting for {draft.obs.spec.workers} workers")


def stopped(obs: Observation, report: AgentReport) -> bool:
    """Whether the worker has heard that its ranks must end, and has none."""
    heard = report.epoch_seen == obs.epoch and report.order_seen >= obs.status.stop_order
    return heard and report.run is RunState.STOPPED


def missing(obs: Observation, worker: int) -> str:
    """What a worker lacks before an attempt can start; "" = nothing."""
    report = obs.report(worker)
    if report is None:
        return "not connected"
    if asked_to_stop(obs, worker):
        return "is being replaced"
    if not report.launcher:
        return "its launcher is not there"
    if not stopped(obs, report):
        return "its ranks have not ended"
    return ""


def asked_to_stop(obs: Observation, worker: int) -> str:
    """Why the worker is to be replaced although it is well: somebody asked it to stop."""
    report = obs.report(worker)
    waiting = obs.status.state in (JobState.GATHERING, JobState.RECOVERING)
    return report.stop_requested if report is not None and waiting else ""


def late_key(worker: int, incarnation: str) -> str:
    """Name of the suspicion that a worker does not get ready."""
    return f"late-{worker}-{incarnation}"


def _late(obs: Observation) -> dict[str, float]:
    if obs.status.state not in (JobState.GATHERING, JobState.RECOVERING):
        return {}
    keys = [late_key(w, obs.view(w).incarnation) for w in range(obs.spec.workers) if missing(obs, w)]
    return {key: obs.status.suspicions.get(key, obs.now) for key in keys}


def gathering(draft: Draft) -> None:
    """All workers are waited for; then the attempt gets its number and its restore plan."""
    fault = faults.fatal(draft.obs)
    if fault:
        breakdown.fail(draft, fault.message)
    if draft.status.stop is not None:
        ending.end(draft)
        return
    lacking = {worker: missing(draft.obs, worker) for worker in range(draft.obs.spec.workers)}
    lacking = {worker: reason for worker, reason in lacking.items() if reason}
    if lacking:
        draft.say("waiting for " + ", ".join(f"worker {worker} ({reason})" for worker, reason in lacking.items()))
        draft.wake(draft.now + draft.obs.spec.deadlines.gather)
        return
    until = draft.status.back_off_until
    if until is not None and draft.now < until:
        draft.say("backing off before the next attempt")
        draft.wake(until)
        return
    choice = restore.choose(draft.obs)
    reading = [w for w, report in draft.obs.reports().items() if not report.storage.loaded]
    from_memory = choice.plan is not None and choice.plan.source is RestoreSource.MEMORY
    if reading and not (from_memory and draft.status.attempt > 0):
        errors = {report.storage.error for report in draft.obs.reports().values()} - {""}
        draft.say("waiting for the list of checkpoints" + "".join(f" ({error})" for error in sorted(errors)))
        return
    if choice.plan is None:
        _nothing_usable(draft, choice.rejected)
        return
    _start(draft, choice.plan)


def _nothing_usable(draft: Draft, rejected: tuple[str, ...]) -> None:
    text = (
        "The job has made progress and no usable checkpoint is left: " + "; ".join(rejected)
        + ". Bring one back, or set spec.checkpoint.resumeFrom to Beginning to start at step 0"
    )  # fmt: skip
    if draft.condition("NoUsableCheckpoint", True, "NothingUsable", text):
        draft.event("NoUsableCheckpoint", text, warning=True)
    draft.say(text)


def _start(draft: Draft, plan: RestorePlan) -> None:
    status = draft.status
    attempt = restore.highest_attempt(draft.obs) + 1
    entry = LineageEntry(attempt=attempt, step=plan.step, parent=plan.attempt)
    draft.set(
        attempt=attempt,
        lineage=(*status.lineage, entry)[-MOST_LINEAGE:],
        restore=plan,
        plan=plans.first(draft.obs.spec.interval, plan.step, status.plan),
        plan_since=draft.now,
        back_off_until=None, last_words=None, stable_since=None, copy=None, persist=None, persist_deadline=None,
        tail_deadline=None,
        progress_step=plan.step,
        incarnations={worker: draft.obs.view(worker).incarnation for worker in range(draft.obs.spec.workers)},
        kept_in_memory=False,
    )  # fmt: skip
    _release_holds(draft)
    where = {
        RestoreSource.BEGINNING: "from the beginning",
        RestoreSource.MEMORY: f"from step {plan.step} in memory",
        RestoreSource.CHECKPOINT: f"from the checkpoint of step {plan.step}",
    }[plan.source]
    if any(item.type == "NoUsableCheckpoint" and item.status for item in draft.status.conditions):
        draft.condition("NoUsableCheckpoint", False, "Found")
    _fill_recovery(draft, plan)
    draft.enter(JobState.STARTING, f"attempt {attempt} starts {where}")
    draft.event("Starting", f"Attempt {attempt} starts {where}" + ("" if plan.exact else " (not bit-equal)"))


def _fill_recovery(draft: Draft, plan: RestorePlan) -> None:
    rows = draft.status.recoveries
    if not rows:
        return
    lost = rows[-1].steps_lost
    if rows[-1].step is not None and lost is not None:
        lost += rows[-1].step - plan.step
    draft.recovery(started_at=draft.now, source=plan.source, step=plan.step, exact=plan.exact, steps_lost=lost)


def _release_holds(draft: Draft) -> None:
    """All holds that workers made by themselves so far belong to what is over."""
    releases = dict(draft.status.releases)
    for worker, report in draft.obs.reports().items():
        releases[worker] = HoldRelease(agent_run=report.agent_run, count=report.self_hold)
    draft.set(releases=releases)


# --- starting and running ---------------------------------------------------------------------------


def _spurious_holds(draft: Draft) -> None:
    held = [key for key in draft.status.suspicions if key.startswith("held-")]
    if any(faults.lasted(draft.obs, key, SPURIOUS_HOLD_SECONDS) for key in held):
        _release_holds(draft)
    for key in held:
        draft.wake(draft.status.suspicions[key] + SPURIOUS_HOLD_SECONDS)


def _wake_for_hang(draft: Draft) -> None:
    seconds = faults.hang_after(draft.obs)
    if seconds is not None:
        draft.wake(draft.now + seconds + 0.001)
    for key, since in draft.status.suspicions.items():
        if key.startswith("absent-"):
            draft.wake(since + faults.ABSENT_SECONDS)


def starting(draft: Draft) -> None:
    """Until every rank has restored."""
    fault = faults.find(draft.obs)
    if fault is None and draft.now - draft.status.state_since >= draft.obs.spec.deadlines.startup:
        fault = faults.start_timeout(draft.obs)
    if fault:
        breakdown.begin(draft, fault)
        return
    if draft.status.stop is not None:
        # Nothing new exists yet, so nothing has to be kept: what the attempt was started from is still there.
        breakdown.stop_ranks(draft, draft.status.stop.reason)
        return
    _spurious_holds(draft)
    draft.wake(draft.status.state_since + draft.obs.spec.deadlines.startup)
    ranks = draft.obs.ranks()
    up = [n for n, rank in ranks.items() if rank.state is not RankState.STARTING and _has_state(rank.step, rank.state)]
    if len(up) < draft.obs.spec.topology.world:
        _wake_for_hang(draft)
        return
    ages = [rank.restored_age_seconds for rank in ranks.values() if rank.restored_age_seconds is not None]
    draft.recovery(restored_at=draft.now - min(ages, default=0.0))
    draft.enter(JobState.RUNNING, "all ranks run")
    draft.condition("Progressing", True, "Running")


def _has_state(step: int | None, state: RankState) -> bool:
    return step is not None or state in (RankState.FINISHED, RankState.EXITED)


def running(draft: Draft) -> None:
    """Steps are made; look for faults, the end, and a better plan."""
    fault = faults.find(draft.obs) or breakdown.non_finite_again(draft.obs)
    if fault:
        breakdown.begin(draft, fault)
        return
    _spurious_holds(draft)
    _progress(draft)
    ranks = draft.obs.ranks()
    if len(ranks) == draft.obs.spec.topology.world and all(faults.ended_well(rank) for rank in ranks.values()):
        ending.finishing(draft)
        return
    _wake_for_hang(draft)
    if draft.status.stop is not None:
        ending.stopping(draft)
        return
    plan = plans.adjusted(draft.obs)
    if plan != draft.status.plan:
        if plan.every_steps != draft.status.plan.every_steps or plan.persist_every != draft.status.plan.persist_every:
            every = plan.every_steps * plan.persist_every
            draft.event("Interval", f"A snapshot every {plan.every_steps} steps, to storage every {every} steps")
        draft.set(plan=plan, plan_since=draft.now)


def _progress(draft: Draft) -> None:
    status, obs = draft.status, draft.obs
    ranks = obs.ranks()
    steps = [rank.step for rank in ranks.values() if rank.step is not None]
    if len(steps) < obs.spec.topology.world:
        return
    low, begin = min(steps), status.restore.step if status.restore else 0
    if low > begin and status.stable_since is None:
        ages = [rank.first_step_age_seconds for rank in ranks.values() if rank.first_step_age_seconds is not None]
        first = draft.now - min(ages, default=0.0)
        draft.recovery(first_step_at=first)
        draft.put(policy.with_progress(dataclasses.replace(draft.status, stable_since=first)))
        if draft.status.recoveries:
            draft.event("Recovered", f"First new step ({low}) of attempt {status.attempt}")
    due = draft.now - status.progress_at >= PROGRESS_SECONDS or status.progress_step == 0
    if low > draft.status.progress_step and due:
        draft.set(progress_step=low, progress_at=draft.now)
    draft.put(policy.given_back(obs.spec.policy, draft.status, draft.now))
