"""Limits of an interval, and how an interval in force follows a better one without shaking."""

from __future__ import annotations

import dataclasses

DEAD_BAND = 1.25
"""An interval that is off by this factor costs a fortieth more of a loss that is itself small: not worth a change."""
LONGER_AT_MOST = 2.0
SHORTER_AT_MOST = 4.0
"""Factors per change. Too short costs saves, too long costs work, so that shortening may be quicker."""
REST_SECONDS = 3600.0


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


def outside_band(current: float, candidate: float, band: float = DEAD_BAND) -> bool:
    """Whether `candidate` differs from `current` by more than the factor `band`."""
    return max(current, candidate) > band * min(current, candidate)


def follow(current: float, candidate: float, limit: Bounds, band: float = DEAD_BAND) -> float:
    """
    The next interval: `current` while the candidate is within the dead band, else the candidate, no farther off than
    the largest step. Always within the bounds, however far `current` was outside them.
    """
    wanted = limit.clamp(candidate)
    if not outside_band(current, wanted, band):
        return limit.clamp(current)
    return limit.clamp(min(current * LONGER_AT_MOST, max(current / SHORTER_AT_MOST, wanted)))


def resting(period_seconds: float, changed_at: float, failed_at: float | None, now: float) -> bool:
    """
    Whether a change must wait: two periods and an hour must have passed since the last one, unless something has failed
    since then.
    """
    if failed_at is not None and failed_at > changed_at:
        return False
    return now - changed_at < max(2 * period_seconds, REST_SECONDS)


def whole_steps(seconds: float, step_seconds: float) -> int:
    """
    A finite interval in whole steps, at least 1. Rounding keeps the loss least also where steps vary: Du, Marchal,
    Pallez, Robert, "Robustness of the Young/Daly formula for stochastic iterative applications", ICPP 2020.
    """
    return max(1, round(seconds / step_seconds))
