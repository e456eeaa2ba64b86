"""Limits, dead band, rate of change, rest, whole steps. CASES O-24: never shorter than one save takes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lastwords_operator.core.interval import bounds, single
from lastwords_operator.core.interval.bounds import Limits

SECONDS = st.floats(1e-3, 1e6)
ANY = st.one_of(SECONDS, st.just(0.0), st.just(math.inf))


@given(ANY, SECONDS, SECONDS, SECONDS, st.floats(0, 1e4))
def test_never_outside_the_bounds(wanted: float, step: float, least: float, durable: float, cost: float) -> None:
    limits = Limits(least_seconds=least, most_seconds=least * 3)
    allowed = bounds.bounds(limits, step, cost_seconds=cost, durable_seconds=durable)
    following = allowed.clamp(wanted)
    assert least <= allowed.low_seconds <= following <= allowed.high_seconds
    assert following >= step and following + cost >= durable * (1 - 1e-12)


@given(SECONDS, ANY)
def test_one_change_goes_only_so_far(current: float, wanted: float) -> None:
    following = bounds.limited(current, wanted)
    assert (
        following / current * (1 + 1e-12) >= 1 / bounds.SHORTER_AT_MOST and following / current <= bounds.LONGER_AT_MOST
    )
    assert following == wanted or abs(wanted - current) > abs(following - current)


def test_what_is_impossible_wins_against_the_policy() -> None:
    """A save that takes longer than the longest allowed interval still is alone in flight."""
    allowed = bounds.bounds(Limits(most_seconds=60), 1.0, cost_seconds=5, durable_seconds=300)
    assert (allowed.low_seconds, allowed.high_seconds) == (295, 295)


@given(SECONDS, st.floats(0.1, 10))
def test_a_change_is_worth_it_outside_the_dead_band(best: float, ratio: float) -> None:
    costs = single.Costs(save_seconds=1, mtbf_seconds=best**2 / 2)
    now, then = single.plain_loss(best * ratio, costs), single.plain_loss(best, costs)
    off = max(ratio, 1 / ratio)
    if abs(off - bounds.DEAD_BAND) > 1e-6:
        assert bounds.worth(now, then) == (off > bounds.DEAD_BAND)


def resting(
    now: float, *, period: float = 10, changed: float = 0, failed: float | None = None, gain: float = 1.5
) -> bool:
    change = bounds.Change(period_seconds=period, changed_at=changed, failed_at=failed, loss_now=gain, loss_then=1.0)
    return bounds.resting(change, now)


def test_rest_between_changes() -> None:
    assert resting(3599) and not resting(3600)
    assert resting(5999, period=3000) and not resting(6000, period=3000)
    assert not resting(11, failed=10)
    assert resting(25, changed=20, failed=10)
    assert resting(599, gain=3) and not resting(600, gain=3)
    assert resting(5999, period=3000, gain=3)


def test_whole_steps() -> None:
    assert [bounds.whole_steps(seconds, 10) for seconds in (0, 4, 14, 16, 1e6)] == [1, 1, 1, 2, 100_000]
