"""
The snapshot plan: every how many steps a snapshot is taken, and which of them go to storage.

Auto is a plain default: a snapshot costs at most about a hundredth of the time, and one goes to storage about
every minute, never sooner than the last one took to get there. A plan is renumbered when what is measured would
change it by more than the dead band, and takes effect a margin of steps ahead, so that every rank hears of it first.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from lastwords.protocol.messages import RankReport, RankState
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords_operator.core.model import Interval, IntervalMode
from lastwords_operator.core.observation import Observation

COST_SHARE = 0.01
PERSIST_SECONDS = 60.0
PERSIST_MARGIN = 1.5
MOST_STEPS = 10_000
DEAD_BAND = 1.5
FIRST_SECONDS = 5.0
"""The defaults hold for so long: the first steps are not like the others."""
CHANGE_SECONDS = 30.0
"""A plan holds for so long at least, so that single measurements do not shake it."""
SPREAD_SECONDS = 1.0
"""Time in which a new plan certainly reaches every rank."""
FIRST_PERSIST_EVERY = 50


def first(interval: Interval, begin: int, previous: SnapshotPlan) -> SnapshotPlan:
    """
    Plan of an attempt that goes on from step `begin`: as the previous attempt's, which was measured, or the defaults of
    a first attempt (number 0 as `previous`).
    """
    if interval.mode is IntervalMode.FIXED_STEPS:
        every, persist = interval.steps, 1
    elif previous.number:
        every, persist = previous.every_steps, previous.persist_every
    else:
        every, persist = 1, FIRST_PERSIST_EVERY
    return SnapshotPlan(number=previous.number + 1, every_steps=every, persist_every=persist, from_step=begin + every)


def step_seconds(observation: Observation) -> float | None:
    """Duration of a step: the median over the ranks."""
    known = [rank.step_seconds for rank in observation.ranks().values() if rank.step_seconds]
    return statistics.median(known) if known else None


def wanted(observation: Observation) -> tuple[int, int] | None:
    """(every_steps, persist_every) by what is measured; None: nothing is yet."""
    interval = observation.spec.interval
    duration = step_seconds(observation)
    if duration is None:
        return None
    if interval.mode is IntervalMode.FIXED_STEPS:
        return interval.steps, 1
    if interval.mode is IntervalMode.FIXED_SECONDS:
        return _clamp(interval.seconds / duration), 1
    ranks = observation.ranks().values()
    # The median: one rank that was disturbed while it copied says nothing about the next copy.
    cost = statistics.median(max(rank.copy_seconds_last, rank.stall_seconds_last) for rank in ranks)
    every = _clamp(math.ceil(cost / (COST_SHARE * duration)))
    slowest = max((report.storage.persist_seconds_last for report in observation.reports().values()), default=0.0)
    seconds = max(PERSIST_SECONDS, PERSIST_MARGIN * slowest)
    return every, _clamp(seconds / (every * duration))


def _clamp(steps: float) -> int:
    return max(1, min(MOST_STEPS, round(steps)))


def margin(observation: Observation) -> int:
    """Steps ahead at which a new plan begins."""
    duration = step_seconds(observation)
    return 1 + (math.ceil(SPREAD_SECONDS / duration) if duration else 1)


def adjusted(observation: Observation) -> SnapshotPlan:
    """The plan that should be in force: the present one, or its successor."""
    plan = observation.status.plan
    ranks = _running(observation)
    if len(ranks) < observation.spec.topology.world or any(rank.step is None for rank in ranks):
        return plan
    steps = [rank.step or 0 for rank in ranks]
    if max(steps) < plan.from_step:
        return plan
    ahead = max(steps) + margin(observation)
    if any(rank.plan_number < plan.number for rank in ranks):
        if min(steps) <= plan.from_step:
            return plan
        # Somebody did not have it in time, so nobody took it: once more, with a wider margin.
        again = max(steps) + 2 * margin(observation)
        stop = again if plan.stop_after is not None else None
        return dataclasses.replace(plan, number=plan.number + 1, from_step=again, stop_after=stop)
    target = wanted(observation)
    if target is None or plan.stop_after is not None or _near(plan, target) or _young(observation):
        return plan
    every, persist = target
    return SnapshotPlan(number=plan.number + 1, every_steps=every, persist_every=persist, from_step=ahead)


def stopping(observation: Observation) -> SnapshotPlan:
    """All ranks stop after one and the same step, a margin ahead of the foremost."""
    plan = observation.status.plan
    newest = max((rank.step or 0 for rank in observation.ranks().values()), default=0)
    last = newest + margin(observation)
    return dataclasses.replace(plan, number=plan.number + 1, from_step=last, stop_after=last)


def _running(observation: Observation) -> list[RankReport]:
    return [rank for rank in observation.ranks().values() if rank.state is RankState.RUNNING]


def _young(observation: Observation) -> bool:
    plan = observation.status.plan
    default = (plan.every_steps, plan.persist_every) == (1, FIRST_PERSIST_EVERY)
    first = observation.status.stable_since
    if first is None:
        return True
    age = observation.now - max(observation.status.plan_since, first)
    return age < (FIRST_SECONDS if default else CHANGE_SECONDS)


def _near(plan: SnapshotPlan, target: tuple[int, int]) -> bool:
    every, persist = target
    pairs = ((plan.every_steps, every), (plan.every_steps * plan.persist_every, every * persist))
    return all(max(old, new) <= DEAD_BAND * min(old, new) for old, new in pairs)
