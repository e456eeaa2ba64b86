"""Limits of an interval, and when and how far an interval in force follows a better one, without shaking."""

from __future__ import annotations

import dataclasses

DEAD_BAND = 1.25
"""An interval that is off by this factor costs a fortieth more of a loss that is itself small: not worth a change."""
LONGER_AT_MOST = 2.0
SHORTER_AT_MOST = 4.0
"""Factors per change. Too short costs saves, too long costs work, so that shortening may be quicker."""
REST_SECONDS = 3600.0
URGENT_REST_SECONDS = 600.0
URGENT = 2.0
"""A plan that loses as many times what another would is left sooner: it was made in a heap of failures that is over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least and most seconds of useful work between two saves."""

    low_seconds: float
    high_seconds: float

    def clamp(self, seconds: float) -> float:
        """
        The nearest allowed interval: the best one under the bounds, since the loss has one minimum and grows away
        from it.
        """
        return min(self.high_seconds, max(self.low_seconds, seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the policy allows, in seconds of useful work."""

    least_seconds: float = 0.0
    most_seconds: float = 6 * 3600.0


def bounds(limits: Limits, step_seconds: float, *, cost_seconds: float, durable_seconds: float) -> Bounds:
    """
    At least one step, and one save in flight: the period (interval + cost) must not be below the time to durable. The
    policy's limits hold where they can: what is physically impossible wins against them.
    """
    physical = max(step_seconds, durable_seconds - cost_seconds)
    low = max(physical, limits.least_seconds)
    return Bounds(low_seconds=low, high_seconds=max(physical, limits.most_seconds))


def limited(current: float, wanted: float) -> float:
    """`wanted`, but no farther from `current` than one change may go."""
    return min(current * LONGER_AT_MOST, max(current / SHORTER_AT_MOST, wanted))


def worth(loss_now: float, loss_then: float) -> bool:
    """
    Whether a change saves more than the dead band is wide. An interval that is off by a factor r costs (r + 1/r) / 2
    times the least plain loss, so that for one interval this is r > `DEAD_BAND`. As every change must lower the loss,
    a plan cannot go to and fro between equally good ones.
    """
    return loss_now > loss_then * (DEAD_BAND + 1 / DEAD_BAND) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """
    A change under consideration: the period in force and when it began, the newest failure, and what it would better.
    """

    period_seconds: float
    changed_at: float
    failed_at: float | None
    loss_now: float
    loss_then: float


def resting(change: Change, now: float) -> bool:
    """
    Whether a change must wait: two periods and an hour must have passed since the last one, ten minutes where it is
    urgent, unless something has failed since then.
    """
    if change.failed_at is not None and change.failed_at > change.changed_at:
        return False
    rest = URGENT_REST_SECONDS if change.loss_now > URGENT * change.loss_then else REST_SECONDS
    return now - change.changed_at < max(2 * change.period_seconds, rest)


def whole_steps(seconds: float, step_seconds: float) -> int:
    """
    A finite interval in whole steps, at least 1. Rounding keeps the loss least also where steps vary: Du, Marchal,
    Pallez, Robert, "Robustness of the Young/Daly formula for stochastic iterative applications", ICPP 2020.
    """
    return max(1, round(seconds / step_seconds))
