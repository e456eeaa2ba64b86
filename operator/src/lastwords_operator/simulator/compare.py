"""Policies side by side on the same failures, over several histories, with intervals of confidence."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from lastwords_operator.core import numeric
from lastwords_operator.core.interval import single
from lastwords_operator.simulator import policies
from lastwords_operator.simulator.failures import Failure
from lastwords_operator.simulator.world import Outcome, World, simulate

BEST = "best constant"
"""The constant interval that would have been best on each history, found afterwards."""
_STEPS_TO_BEST = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over histories and the half width of its 95 % interval of confidence (0 for a single history)."""

    mean: float
    half_width: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One policy: shares of the time, in means over the histories; failures and changes of the plan in one of them."""

    policy: str
    goodput: Estimate
    saving: float
    redone: float
    recovering: float
    waiting: float
    failures: float
    changes: float
    interval_seconds: float
    """Work between two checkpoints, median over the plans of all histories."""


def run(
    world: World, histories: Sequence[Sequence[Failure]], names: Sequence[str]
) -> tuple[list[Line], dict[str, Outcome]]:
    """A line for each policy, and its outcome on the first history."""
    lines, first = [], {}
    for name in names:
        outcomes = [_one(world, failures, name) for failures in histories]
        lines.append(_line(name, outcomes))
        first[name] = outcomes[0]
    return lines, first


def best_constant(world: World, failures: Sequence[Failure]) -> Outcome:
    """
    The outcome of the best constant interval in hindsight. The search begins at the formula for the true mean and
    goes by sixths of a factor 2 to the best; the loss is rough on a single history, so a finer search would only fit
    its noise.
    """
    guess = policies.known(single.daly)(world, failures).plan(0.0, math.inf).snapshot_seconds
    guess = min(world.seconds, max(guess, world.step_seconds))

    def outcome(exponent: int) -> Outcome:
        return simulate(world, failures, policies.Fixed(guess * math.exp2(exponent / 6)))

    found = {exponent: outcome(exponent) for exponent in range(-_STEPS_TO_BEST, _STEPS_TO_BEST + 1)}
    return max(found.values(), key=lambda one: one.goodput)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, half_width=0.0)
    freedom = len(values) - 1
    # A squared t over (t^2 + freedom) is Beta(1/2, freedom/2).
    share = numeric.beta_quantile(0.5, freedom / 2, 0.95)
    t = math.sqrt(freedom * share / (1 - share))
    return Estimate(mean=mean, half_width=t * statistics.stdev(values) / math.sqrt(len(values)))


def _one(world: World, failures: Sequence[Failure], name: str) -> Outcome:
    if name == BEST:
        return best_constant(world, failures)
    return simulate(world, failures, policies.NAMED[name](world, failures))


def _line(name: str, outcomes: Sequence[Outcome]) -> Line:
    def share(seconds: Callable[[Outcome], float]) -> float:
        return statistics.fmean(seconds(one) / one.seconds for one in outcomes)

    return Line(
        policy=name,
        goodput=estimate([one.goodput for one in outcomes]),
        saving=share(lambda one: one.saving),
        redone=share(lambda one: one.redone),
        recovering=share(lambda one: sum(one.recovering.values())),
        waiting=share(lambda one: one.waiting),
        failures=statistics.fmean(one.failures for one in outcomes),
        changes=statistics.fmean(len(one.changes) - 1 for one in outcomes),
        interval_seconds=statistics.median(seconds for one in outcomes for _, seconds in one.changes),
    )
