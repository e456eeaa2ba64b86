"""Limits, dead band, rate of change, rest, whole steps. CASES O-24: never shorter than one save takes."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from lastwords_operator.core.interval import bounds
from lastwords_operator.core.interval.bounds import Bounds, Limits

SECONDS = st.floats(1e-3, 1e6)
ANY = st.one_of(SECONDS, st.just(0.0), st.just(math.inf))


@given(SECONDS, ANY, SECONDS, SECONDS, SECONDS, st.floats(0, 1e4))
def test_never_outside_the_bounds(
    current: float, candidate: float, step: float, least: float, durable: float, cost: float
) -> None:
    limits = Limits(least_seconds=least, most_seconds=least * 3)
    allowed = bounds.bounds(limits, step, cost_seconds=cost, durable_seconds=durable)
    following = bounds.follow(current, candidate, allowed)
    assert allowed.low_seconds <= following <= allowed.high_seconds
    assert following >= step and following + cost >= durable * (1 - 1e-12)


@given(SECONDS, ANY)
def test_changes_are_limited_and_small_ones_left_out(current: float, candidate: float) -> None:
    following = bounds.follow(current, candidate, Bounds(low_seconds=1e-9, high_seconds=1e12))
    if following == current:
        assert not bounds.outside_band(current, max(1e-9, min(1e12, candidate)))
    else:
        assert bounds.outside_band(current, following)
        assert 1 / bounds.SHORTER_AT_MOST <= following / current <= bounds.LONGER_AT_MOST


def test_what_is_impossible_wins_against_the_policy() -> None:
    """A save that takes longer than the longest allowed interval still is alone in flight."""
    allowed = bounds.bounds(Limits(most_seconds=60), 1.0, cost_seconds=5, durable_seconds=300)
    assert (allowed.low_seconds, allowed.high_seconds) == (295, 295)


def test_an_interval_in_force_below_the_bound_is_raised_at_once_O_24() -> None:
    """Storage became slow: the dead band does not hold a save back that cannot work."""
    slow = bounds.bounds(Limits(), 1.0, cost_seconds=0, durable_seconds=110)
    assert bounds.follow(100, 20, slow) == 110
    fast = bounds.bounds(Limits(), 1.0, cost_seconds=0, durable_seconds=1)
    assert bounds.follow(110, 20, fast) == 27.5


def test_rest_between_changes() -> None:
    assert bounds.resting(10, changed_at=0, failed_at=None, now=3599)
    assert not bounds.resting(10, changed_at=0, failed_at=None, now=3600)
    assert bounds.resting(3000, changed_at=0, failed_at=None, now=5999)
    assert not bounds.resting(3000, changed_at=0, failed_at=10, now=11)
    assert bounds.resting(3000, changed_at=20, failed_at=10, now=25)


def test_noise_within_the_dead_band_changes_nothing() -> None:
    rng = random.Random(3)
    current = 600.0
    for _ in range(1000):
        current = bounds.follow(current, 600 * rng.uniform(0.81, 1.24), Bounds(low_seconds=1, high_seconds=1e5))
    assert current == 600


def test_whole_steps() -> None:
    assert [bounds.whole_steps(seconds, 10) for seconds in (0, 4, 14, 16, 1e6)] == [1, 1, 1, 2, 100_000]
