"""
What is wrong in an observation: the root of a fault, told apart from its echoes.

Only ranks of the attempt in force count, so that neither the ends we caused ourselves nor late news of an
older attempt start anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lastwords.protocol.messages import RankReport, RankState, RunState
from lastwords_operator.core.model import Deadlines, Fault, FaultKind, JobState
from lastwords_operator.core.observation import DEAD, TRAINER, Observation

SECONDARY_SECONDS = 2.0
"""With echoes only for so long, the network is the root."""
REPORT_SECONDS = 3.0
"""Agents report every second; what an older report says of a rank is no ground for a judgement."""
RESTORE_ERROR = "RestoreError"
"""The exception by which a rank says that what it was to restore is damaged."""
ABSENT_SECONDS = 10.0
"""A worker that shows no rank of the attempt for so long has lost them."""

_SIGKILL, _SIGTERM = 9, 15


def find(observation: Observation) -> Fault | None:
    """The root fault, or None. `provisional`: only echoes so far."""
    ranks = observation.ranks()
    return (
        fatal(observation)
        or _roots(observation, ranks)
        or _worker_gone(observation)
        or _secondary(observation, ranks)
        or _hang(observation, ranks)
    )


def fatal(observation: Observation) -> Fault | None:
    """Something that no restart can heal."""
    for worker, report in sorted(observation.reports().items()):
        if report.launcher_error:
            return Fault(
                kind=FaultKind.FATAL, message=report.launcher_error, infrastructure=False, worker=worker,
                before_first_step=True,
            )  # fmt: skip
        if report.attempt != observation.status.attempt:
            continue
        for notice in report.notices:
            if notice.fatal:
                return Fault(
                    kind=FaultKind.FATAL, message=notice.text, infrastructure=False, worker=worker, rank=notice.rank
                )
    return None


def exit_code(rank: RankReport) -> int | None:
    """Exit code as a shell shows it: 128 + n for signal n."""
    if rank.exit is None:
        return None
    return 128 + rank.exit.signal if rank.exit.signal is not None else rank.exit.code


def ended_well(rank: RankReport) -> bool:
    """Whether the rank is through with its script."""
    return rank.state is RankState.FINISHED or (
        rank.state is RankState.EXITED and exit_code(rank) == 0 and not (rank.exit and rank.exit.exception)
    )


def _roots(observation: Observation, ranks: dict[int, RankReport]) -> Fault | None:
    launcher = _launcher_lost(observation, ranks)
    if launcher:
        return launcher
    restore = _restore_failed(observation)
    if restore:
        return restore
    failed = [
        rank
        for rank in ranks.values()
        if rank.state in (RankState.EXITED, RankState.ERRORED)
        and not ended_well(rank)
        and not (rank.exit and rank.exit.secondary)
    ]
    if not failed:
        return None
    # A process that was killed cannot have been the echo of an exception; the other way round happens.
    return rank_fault(observation, min(failed, key=lambda rank: (not _was_killed(rank), rank.rank)))


def _was_killed(rank: RankReport) -> bool:
    return rank.exit is None or rank.exit.signal is not None


def rank_fault(observation: Observation, rank: RankReport) -> Fault:
    """The fault of one rank that ended or is about to."""
    code = exit_code(rank)
    details = rank.exit
    worker = observation.spec.topology.worker_of(rank.rank)
    step = details.step if details and details.step is not None else rank.step
    early = not made_step(observation)
    at = "before its first step" if early or step is None else f"at step {step}"
    if details and (details.exception or "").rpartition(".")[2] == RESTORE_ERROR:
        kind, cause = FaultKind.RESTORE_FAILED, f"cannot read the state it was given: {details.message}"
    elif details and details.exception:
        kind, cause = FaultKind.USER_EXCEPTION, f"raised {details.exception}: {details.message} ({at})"
    elif code is None or code in (128 + _SIGKILL, 128 + _SIGTERM):
        name = {128 + _SIGTERM: "SIGTERM"}.get(code or 0, "SIGKILL")
        kind, cause = FaultKind.RANK_KILLED, f"was killed ({name}) {at}" if code is not None else f"is gone ({at})"
    elif code > 128:
        kind, cause = FaultKind.RANK_CRASHED, f"crashed with signal {code - 128} {at}"
    else:
        kind, cause = FaultKind.RANK_EXITED, f"left with exit code {code} {at}"
    infrastructure = kind in (FaultKind.RANK_KILLED, FaultKind.RESTORE_FAILED)
    return Fault(
        kind=kind, message=f"Rank {rank.rank} {cause}", infrastructure=infrastructure,
        worker=worker, rank=rank.rank, step=step, exit_code=code,
        exception=details.exception or "" if details else "", traceback=details.traceback if details else "",
        before_first_step=early, error=details.message if details else "",
    )  # fmt: skip


def made_step(observation: Observation) -> bool:
    """Whether any rank passed a boundary that is new in this attempt."""
    begin = observation.status.restore.step if observation.status.restore else 0
    return observation.status.stable_since is not None or any(
        rank.step is not None and rank.step > begin for rank in observation.ranks().values()
    )


def _launcher_lost(observation: Observation, ranks: dict[int, RankReport]) -> Fault | None:
    for worker, report in sorted(observation.reports().items()):
        if report.attempt != observation.status.attempt:
            continue
        own = [ranks[rank] for rank in observation.spec.topology.ranks_of(worker) if rank in ranks]
        dead = not report.launcher and own and all(rank.state is RankState.EXITED and _was_killed(rank) for rank in own)
        if dead or observation.view(worker).containers.get(TRAINER) == DEAD:
            return Fault(
                kind=FaultKind.LAUNCHER_LOST, message=f"The launcher of worker {worker} died, and its ranks with it",
                infrastructure=True, worker=worker, before_first_step=not made_step(observation),
            )  # fmt: skip
    return None


def _restore_failed(observation: Observation) -> Fault | None:
    for worker, report in sorted(observation.reports().items()):
        prepared = report.prepared
        if prepared and prepared.attempt == observation.status.attempt and not prepared.ok:
            return Fault(
                kind=FaultKind.RESTORE_FAILED, message=f"Worker {worker} cannot get the state: {prepared.error}",
                infrastructure=True, worker=worker, before_first_step=True,
            )  # fmt: skip
    return None


def _worker_gone(observation: Observation) -> Fault | None:
    status = observation.status
    for view in sorted(observation.workers, key=lambda view: view.worker):
        if view.worker >= observation.spec.workers:
            continue
        known = status.incarnations.get(view.worker, view.incarnation)
        if view.incarnation and known and view.incarnation != known:
            message = f"Worker {view.worker} was replaced by another one"
        elif lasted(observation, f"absent-{view.worker}", ABSENT_SECONDS):
            message = f"Worker {view.worker} runs no rank of attempt {status.attempt} any more"
        elif lasted(observation, f"silent-{view.worker}", 0.0):
            message = f"Worker {view.worker} is silent and the steps have stopped"
        elif view.connected and view.report and view.report.stop_requested:
            return Fault(
                kind=FaultKind.WORKER_STOPPING, infrastructure=True, worker=view.worker,
                message=f"Worker {view.worker} was asked to stop: {view.report.stop_requested}",
            )  # fmt: skip
        else:
            continue
        return Fault(
            kind=FaultKind.WORKER_LOST, message=message, infrastructure=True, worker=view.worker,
            seconds_to_detect=view.silent_seconds, before_first_step=not made_step(observation),
        )  # fmt: skip
    return None


def _secondary(observation: Observation, ranks: dict[int, RankReport]) -> Fault | None:
    echoes = [
        rank for rank in ranks.values()
        if rank.state in (RankState.EXITED, RankState.ERRORED) and rank.exit and rank.exit.secondary
    ]  # fmt: skip
    if not echoes:
        return None
    first = min(echoes, key=lambda rank: rank.rank)
    details = first.exit
    assert details is not None
    settled = lasted(observation, "secondary", SECONDARY_SECONDS)
    cause = " and no rank had died" if settled else "; the cause is looked for"
    return Fault(
        kind=FaultKind.NETWORK, infrastructure=True, provisional=not settled,
        message=f"Connections between ranks broke{cause} (rank {first.rank}: {details.message})",
        before_first_step=not made_step(observation), traceback=details.traceback,
    )  # fmt: skip


def start_timeout(observation: Observation) -> Fault:
    """The attempt did not get all its ranks running in time."""
    ranks = observation.ranks()
    late = [
        number for number in range(observation.spec.topology.world)
        if number not in ranks or ranks[number].step is None
    ]  # fmt: skip
    return Fault(
        kind=FaultKind.START_TIMEOUT, infrastructure=False, before_first_step=True,
        message=f"Ranks {late} were not running {observation.spec.deadlines.startup:.0f} s after the start",
    )  # fmt: skip


# --- what only counts if it lasts -------------------------------------------------------------------


def lasted(observation: Observation, key: str, seconds: float) -> bool:
    """Whether a suspicion has held for so long, seen by this coordinator."""
    since = observation.status.suspicions.get(key)
    return since is not None and observation.now - max(since, observation.coordinator_started_at) >= seconds


def suspicions(observation: Observation) -> dict[str, float]:
    """What looks wrong now, and since when it does."""
    now, known = observation.now, observation.status.suspicions
    return {key: known.get(key, now) for key in sorted(set(_suspects(observation)))}


def _suspects(observation: Observation) -> Iterable[str]:
    status = observation.status
    if not status.state.ranks_run:
        return
    for worker, report in observation.reports().items():
        here = report.attempt == status.attempt
        if status.state is not JobState.STARTING and (not here or report.run is not RunState.RUNNING):
            yield f"absent-{worker}"
        release = status.releases.get(worker)
        over = release.count if release and release.agent_run == report.agent_run else 0
        if report.self_hold > over:
            yield f"held-{worker}-{report.agent_run}-{report.self_hold}"
    ranks = observation.ranks().values()
    if any(rank.exit and rank.exit.secondary for rank in ranks):
        yield "secondary"
    yield from _silent(observation)


def silence(observation: Observation, worker: int) -> float:
    """Seconds since the worker was heard; one that never was has been silent since the coordinator started."""
    view = observation.view(worker)
    known = view.connected or view.report is not None
    return view.silent_seconds if known else observation.now - observation.coordinator_started_at


def _silent(observation: Observation) -> Iterable[str]:
    """Silent workers, but only while the steps of the others have stopped too, and never all at once."""
    limit = observation.spec.deadlines.silent
    if observation.now - observation.coordinator_started_at < observation.spec.deadlines.reconnect:
        return
    silent = [worker for worker in range(observation.spec.workers) if silence(observation, worker) >= limit]
    topology = observation.spec.topology
    ranks = [rank for number, rank in observation.ranks().items() if topology.worker_of(number) not in silent]
    if len(silent) == observation.spec.workers or not ranks:
        return
    if all(rank.quiet_seconds >= limit for rank in ranks):
        yield from (f"silent-{worker}" for worker in silent)


# --- hangs ------------------------------------------------------------------------------------------


def phase_limit(deadlines: Deadlines, rank: RankReport, step_seconds: float | None) -> float:
    """Seconds that a rank may stay where it is. A phase that is not known gets the longest."""
    if rank.phase_timeout_seconds is not None:
        return rank.phase_timeout_seconds
    training = deadlines.training_floor
    if step_seconds is not None:
        training = max(training, deadlines.training_factor * step_seconds)
    limits = {
        "startup": deadlines.startup, "restore": deadlines.restore, "first_step": deadlines.first_step,
        "training": training, "save": deadlines.save, "evaluate": deadlines.evaluate,
    }  # fmt: skip
    return limits.get(rank.phase or "", max(limits.values()))


def overdue(observation: Observation) -> dict[int, float]:
    """Rank -> seconds by which it has exceeded what its phase allows (negative: still allowed)."""
    ranks = {number: rank for number, rank in observation.ranks().items() if _moves(rank)}
    durations = [rank.step_seconds for rank in ranks.values() if rank.step_seconds is not None]
    typical = max(durations, default=None)
    deadlines = observation.spec.deadlines
    quiet = {number: rank.quiet_seconds + _age(observation, number) for number, rank in ranks.items()}
    waited = {
        number: min(quiet[other] for other in ranks if _before(ranks[other], rank)) for number, rank in ranks.items()
    }
    return {number: waited[number] - phase_limit(deadlines, rank, typical) for number, rank in ranks.items()}


def _before(other: RankReport, rank: RankReport) -> bool:
    """
    Whether `rank` may have been waiting for `other`: it is not further. What moved there lately excuses the rank, so
    that the end of a long evaluation on one rank is not the moment at which all others count as hanging.
    """
    return (-1 if other.step is None else other.step) <= (-1 if rank.step is None else rank.step)


def _age(observation: Observation, rank: int) -> float:
    """Seconds since the report on the rank; a rank that moves is reported at once, so nothing moved since."""
    return min(1.0, observation.view(observation.spec.topology.worker_of(rank)).silent_seconds)


def hang_after(observation: Observation) -> float | None:
    """Seconds until the job counts as hanging if nothing moves; None: nothing runs."""
    late = overdue(observation)
    return max(0.0, max(_excuses(observation, late), -max(late.values()))) if late else None


def _moves(rank: RankReport) -> bool:
    return rank.state in (RankState.STARTING, RankState.RUNNING)


def _excuses(observation: Observation, late: dict[int, float]) -> float:
    """
    Seconds for which some rank is still allowed a long phase of its own (an evaluation on one rank, a first step
    that compiles): the others wait for it and must not be counted as hanging. 0 = no excuse.
    """
    ranks = observation.ranks()
    return max((-late[number] for number in late if ranks[number].phase != "training"), default=0.0)


def _hang(observation: Observation, ranks: dict[int, RankReport]) -> Fault | None:
    late = overdue(observation)
    if not late or max(late.values()) < 0 or _excuses(observation, late) > 0:
        return None
    heard = [worker for worker in observation.reports() if silence(observation, worker) < REPORT_SECONDS]
    if len(heard) < observation.spec.workers:
        return None  # a silent worker is judged as such
    stuck = max(late, key=lambda number: (late[number], -number))
    fault = Fault(
        kind=FaultKind.HANG, infrastructure=False, rank=stuck, worker=observation.spec.topology.worker_of(stuck),
        step=ranks[stuck].step, message="", seconds_to_detect=max(rank.quiet_seconds for rank in ranks.values()),
        before_first_step=not made_step(observation),
    )  # fmt: skip
    return with_culprit(observation, fault)


def with_culprit(observation: Observation, fault: Fault) -> Fault:
    """
    Name the rank that a hang comes from: one that is stopped or does not answer, else the only one a step behind,
    else the only one that is not in a collective.
    """
    ranks = {number: rank for number, rank in observation.ranks().items() if _moves(rank)}
    number, how = _culprit(ranks)
    phase = next((rank.phase or "unknown" for rank in ranks.values() if rank.rank == (number or 0)), "unknown")
    quiet = fault.seconds_to_detect
    if number is None:
        message = f"No rank has made a step for {quiet:.0f} s (phase {phase}); {how}"
        return dataclasses.replace(fault, message=message, rank=None, worker=None)
    rank = ranks[number]
    message = f"Rank {number} hangs: {how} (step {rank.step}, phase {phase}, no step for {quiet:.0f} s)"
    return dataclasses.replace(
        fault, message=message, rank=number, worker=observation.spec.topology.worker_of(number), step=rank.step,
        infrastructure=how.startswith("its process"), traceback=rank.stack.text if rank.stack else "",
    )  # fmt: skip


def stuck(rank: RankReport) -> bool:
    """Whether the process is known not to answer: it cannot copy anything and is not waited for."""
    return rank.stack is not None and (not rank.stack.responsive or rank.stack.process_state in ("T", "t", "Z"))


def _culprit(ranks: dict[int, RankReport]) -> tuple[int | None, str]:
    asked = [rank for rank in ranks.values() if rank.stack is not None]
    for rank in sorted(asked, key=lambda rank: rank.rank):
        if stuck(rank):
            state = rank.stack.process_state if rank.stack else ""
            return rank.rank, f"its process {'is stopped' if state in ('T', 't') else 'does not answer'}"
    behind = {number: (-1 if rank.step is None else rank.step) for number, rank in ranks.items()}
    lowest = [number for number in behind if behind[number] == min(behind.values())]
    if len(lowest) == 1 and len(ranks) > 1:
        return lowest[0], "it is a step behind the others"
    outside = [rank.rank for rank in asked if rank.stack and rank.stack.in_collective is False]
    if len(outside) == 1 and len(asked) > 1:
        return outside[0], "it is the only one that is not in a collective"
    if len(ranks) == 1:
        return next(iter(ranks)), "it makes no step"
    return None, "no single rank stands out" if asked else "every rank is asked where it is"
