"""
Last words: which step of a broken attempt to keep, and what has to be copied from live memory for it.

First everybody who is believed alive stands still (bounded by a deadline), then the newest step is chosen that live
memory, ready parts or storage can give, then it is copied. What cannot be kept is refused with the reason, and the next
best is taken.
"""

from __future__ import annotations

import dataclasses

from lastwords.protocol.messages import RankReport, RankState, RestorePlan, RestoreSource
from lastwords.protocol.pieces import TableSummary
from lastwords_operator.core import coverage, faults, restore
from lastwords_operator.core.model import FaultKind, LastWords
from lastwords_operator.core.observation import Observation

HOLD_SECONDS = 5.0
"""Longest wait for a hold to be acknowledged."""
GATE_SECONDS = 1.0
"""Longest wait for a rank to reach its gate, where that would make a newer step whole."""
RELEASE_SECONDS = 5.0
COPY_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to decide yet."""

    reason: str
    until: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """Let the ranks at their gates make one update, so that `step` becomes whole."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyParts:
    """Copy `step` from live memory: part (by rank) -> writer."""

    step: int
    writers: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Go on from this; plan None: there is nothing."""

    choice: restore.Choice


Step = Wait | Release | CopyParts | Keep


def newest_step(observation: Observation) -> int:
    """Newest boundary that any rank of the attempt has passed."""
    begin = observation.status.restore.step if observation.status.restore else 0
    return max((rank.step for rank in observation.ranks().values() if rank.step is not None), default=begin)


def at_rest(rank: RankReport) -> bool:
    """Whether the rank's state is that of its step and stays so until it is released."""
    over = rank.state in (RankState.ERRORED, RankState.FINISHED)
    return rank.step is not None and not rank.odd and (over or (rank.held and rank.state is RankState.RUNNING))


def next_step(observation: Observation, words: LastWords) -> Step:
    """What the last words need next. `words.kept` is None as long as this is asked."""
    now = observation.now
    if now >= words.deadline or not observation.spec.last_words:
        return Keep(choice=restore.choose(observation))
    if observation.status.copy is not None:
        return Wait(reason="live copy", until=observation.status.copy.deadline)
    pause = _pause(observation, words)
    if pause:
        return pause
    table = restore.newest_table(observation)
    if table is None:
        return Keep(choice=restore.choose(observation))
    return _choose(observation, words, table)


def _pause(observation: Observation, words: LastWords) -> Wait | None:
    """Wait for holds, stacks and the root of the fault, each for a bounded time."""
    now = observation.now
    if words.release_deadline is not None and now < words.release_deadline:
        behind = [n for n, rank in observation.ranks().items() if _released(rank, words)]
        if behind:
            return Wait(reason=f"ranks {behind} finish their update", until=words.release_deadline)
    if now < words.hold_deadline:
        moving = _moving(observation)
        if moving:
            return Wait(reason=f"ranks {moving} have not stopped yet", until=words.hold_deadline)
        if words.fault.kind is FaultKind.HANG:
            silent = [n for n, r in observation.ranks().items() if r.state is RankState.RUNNING and r.stack is None]
            if silent:
                return Wait(reason=f"stacks of ranks {silent}", until=words.hold_deadline)
    if words.fault.provisional:
        return Wait(reason="only echoes so far", until=words.began_at + faults.SECONDARY_SECONDS)
    return None


def _released(rank: RankReport, words: LastWords) -> bool:
    assert words.release_to is not None
    short = rank.step is not None and rank.step < words.release_to
    return rank.state is RankState.RUNNING and (rank.odd or (short and rank.at_gate))


def _moving(observation: Observation) -> list[int]:
    """Ranks that are believed alive and have not come to rest."""
    moving = [
        number for number, rank in observation.ranks().items()
        if rank.state is RankState.RUNNING and rank.step is not None and not at_rest(rank) and not faults.stuck(rank)
    ]  # fmt: skip
    for worker in range(observation.spec.workers):
        silent = faults.silence(observation, worker)
        if observation.report(worker) is None and silent < observation.spec.deadlines.silent:
            moving.extend(observation.spec.topology.ranks_of(worker))
    return sorted(moving)


def still_at(observation: Observation, step: int) -> list[int]:
    """Ranks whose live memory is that of `step` and can be copied."""
    return sorted(n for n, r in observation.ranks().items() if r.step == step and at_rest(r) and not faults.stuck(r))


def _choose(observation: Observation, words: LastWords, table: TableSummary) -> Step:
    attempt = observation.status.attempt
    live = {rank.step for rank in observation.ranks().values() if rank.step is not None and at_rest(rank)}
    live -= {step for step in live if _blown_up(observation, step)}
    plans: list[RestorePlan] = []
    copies: dict[int, dict[int, int]] = {}
    refusals = list(words.refusals)
    for step in sorted(live - set(words.tried), reverse=True):
        writers = _writers(observation, table, step)
        plan = restore.memory_plan(observation, table, step, attempt, copied=writers)
        if isinstance(plan, RestorePlan):
            plans.append(plan)
            copies[step] = writers
        else:
            refusals.append(plan)
    ready, rejected = restore.memory_plans(observation)
    choice = restore.pick(observation, [*plans, *ready], [*refusals, *rejected])
    better = _release(observation, words, table, choice)
    if better:
        return better
    chosen = choice.plan
    if chosen and chosen.source is RestoreSource.MEMORY and chosen not in ready and copies.get(chosen.step):
        return CopyParts(step=chosen.step, writers=copies[chosen.step])
    return Keep(choice=choice)


def _blown_up(observation: Observation, step: int) -> bool:
    """Whether the live state is known to hold NaN: a copy would only push a good part out."""
    attempt = observation.status.attempt
    return any(
        not part.finite and part.attempt == attempt and part.step <= step
        for report in observation.reports().values()
        for part in report.parts
    )


def _writers(observation: Observation, table: TableSummary, step: int) -> dict[int, int]:
    ready = restore.ready_parts(observation, table, step, observation.status.attempt)
    done = frozenset().union(*ready.values())
    return coverage.copy_writers(table, still_at(observation, step), done)


def _release(
    observation: Observation, words: LastWords, table: TableSummary, choice: restore.Choice
) -> Release | Wait | None:
    """One update for the ranks at their gates, when the newest step is lost or not exact without it."""
    target = words.newest_step
    plan = choice.plan
    if (plan and plan.step >= target and plan.exact) or _blown_up(observation, target):
        return None
    ranks = observation.ranks()
    behind = [number for number in still_at(observation, target - 1) if ranks[number].state is RankState.RUNNING]
    waiting = [number for number in behind if ranks[number].at_gate]
    if words.release_to is not None or target in words.tried or not behind:
        return None
    patient = words.began_at + GATE_SECONDS
    if len(waiting) < len(behind) and observation.now < patient:
        return Wait(reason=f"ranks {sorted(set(behind) - set(waiting))} reach their gates", until=patient)
    still = [*still_at(observation, target), *waiting]
    ready = restore.ready_parts(observation, table, target, observation.status.attempt)
    writers = coverage.copy_writers(table, still, frozenset().union(*ready.values()))
    better = restore.memory_plan(
        observation, table, target, observation.status.attempt, copied=writers, recorded=waiting
    )
    if isinstance(better, str) or not waiting:
        return None
    worth = plan is None or better.step > plan.step if better.exact else plan is None
    return Release(step=target) if worth or (better.exact and plan is not None and not plan.exact) else None
