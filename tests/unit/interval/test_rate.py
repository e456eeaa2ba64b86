"""The estimate of a rate: plain counts, coverage of its intervals, wrong priors, changes, forgetting, never absurd."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords.protocol import codec
from lastwords_operator.core import rate
from lastwords_operator.core.rate import Prior, Rate, Share


def history(belief: Rate, per_hour: float, events: int, rng: random.Random) -> Rate:
    """After as many Poisson events."""
    for _ in range(events):
        belief = rate.happened(rate.exposed(belief, rng.expovariate(per_hour)))
    return belief


def interval_error(belief: Rate, per_hour: float) -> float:
    """By which factor an interval made of it is off (1 = right); intervals go with the root."""
    ratio = math.sqrt(belief.mean / per_hour)
    return max(ratio, 1 / ratio)


def test_before_anything_is_seen_the_prior_holds() -> None:
    """Sicker runs add a third to it: an interval a seventh shorter, within the dead band."""
    belief = rate.fresh(Prior(events=1, hours=6000))
    assert belief.mean == pytest.approx(1 / 6000, rel=0.35)
    assert belief.mean > 1 / 6000
    assert belief.remembered == 0


def test_weights_are_those_of_bayes() -> None:
    """Step by step, the weights of the runs from the start are their marginal likelihoods."""
    belief = rate.fresh(Prior(events=1, hours=1000))
    for hours in (3.0, 0.5, 20.0):
        belief = rate.exposed(belief, hours / 2)
        belief = rate.happened(rate.exposed(belief, hours / 2))
    total, events = 23.5, 3
    logs = [
        beforehand + a * math.log(b) - (a + events) * math.log(b + total) + math.lgamma(a + events) - math.lgamma(a)
        for a, b, beforehand in zip(belief.prior_events, belief.prior_hours, belief.log_prior_weights, strict=True)
    ][: rate.SICKER_RUNS + 1]
    wanted = [log - logs[0] for log in logs]
    found = [log - belief.log_weights[0] for log in belief.log_weights[: rate.SICKER_RUNS + 1]]
    assert found == pytest.approx(wanted, abs=1e-9)


def test_how_exposure_is_cut_does_not_matter() -> None:
    once = rate.exposed(rate.fresh(Prior()), 100)
    often = rate.fresh(Prior())
    for _ in range(1000):
        often = rate.exposed(often, 0.1)
    assert often.mean == pytest.approx(once.mean, rel=1e-9)


@pytest.mark.parametrize("mtbf_hours", [0.005, 1.0, 100.0])
def test_a_wrong_prior_is_corrected_within_ten_events(mtbf_hours: float) -> None:
    """The prior says 6000 hours. Off by less than a factor 1.5 in the interval in 19 of 20 histories."""
    errors = sorted(
        interval_error(history(rate.fresh(Prior()), 1 / mtbf_hours, 10, random.Random(seed)), 1 / mtbf_hours)
        for seed in range(100)
    )
    assert errors[94] < 1.5
    three = [
        interval_error(history(rate.fresh(Prior()), 1 / mtbf_hours, 3, random.Random(seed)), 1 / mtbf_hours)
        for seed in range(100)
    ]
    assert statistics.median(three) < 1.6


@pytest.mark.parametrize(("before", "after"), [(4.0, 1.0), (1.0, 4.0), (20.0, 1.0), (1.0, 20.0)])
def test_a_change_is_followed_within_ten_events(before: float, after: float) -> None:
    """Plain counts would still be off by the root of half the factor."""
    errors = []
    for seed in range(60):
        rng = random.Random(seed)
        belief = history(history(rate.fresh(Prior()), 1 / before, 20, rng), 1 / after, 10, rng)
        errors.append(interval_error(belief, 1 / after))
    assert statistics.median(errors) < 1.35
    assert sorted(errors)[int(0.85 * len(errors))] < 1.6


def test_a_steady_rate_costs_little() -> None:
    """What noise in the estimate costs on average: below 0.8 % of a loss that is itself a few per cent."""
    extra = []
    for seed in range(10):
        rng = random.Random(seed)
        belief = history(rate.fresh(Prior()), 0.02, 20, rng)
        for _ in range(80):
            belief = history(belief, 0.02, 1, rng)
            ratio = math.sqrt(belief.mean / 0.02)
            extra.append((ratio + 1 / ratio) / 2 - 1)
    assert statistics.mean(extra) < 0.008


def test_credible_intervals_cover_what_they_say() -> None:
    """Truths drawn from the belief itself: nine of ten within the middle 90 %, five of ten within the middle half."""
    rng = random.Random(5)
    prior = Prior(events=2, hours=100)
    inside90 = inside50 = 0
    draws = 200
    for _ in range(draws):
        truth = rng.gammavariate(prior.events, 1 / prior.hours)
        belief = rate.fresh(prior)
        left = 300.0
        while (gap := rng.expovariate(truth)) < left:
            belief, left = rate.happened(rate.exposed(belief, gap)), left - gap
        belief = rate.exposed(belief, left)
        low, high = belief.credible(0.9)
        inside90 += low <= truth <= high
        low, high = belief.credible(0.5)
        inside50 += low <= truth <= high
    assert inside90 / draws == pytest.approx(0.9, abs=0.05)
    assert inside50 / draws == pytest.approx(0.5, abs=0.09)


def test_credible_interval_of_a_plain_pair() -> None:
    """5 events in a bad day on 16 nodes: the published interval for the plain pair, with all weight on it."""
    belief = rate.exposed(rate.fresh(Prior()), 384)
    for _ in range(5):
        belief = rate.happened(belief)
    logs = (0.0, *(-200.0 for _ in belief.log_weights[1:]))
    plain = Rate(**{**vars(belief), "log_weights": logs})
    low, high = plain.credible(0.9)
    assert (low * 24000, high * 24000) == pytest.approx((9.8234, 39.5227), rel=1e-4)


def test_everything_fades_back_to_the_prior() -> None:
    sick = history(rate.fresh(Prior()), 10, 50, random.Random(1))
    assert sick.mean > 5
    means = [rate.faded(sick, rate.fading(720 * n, 720)).mean for n in range(0, 30)]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(rate.fresh(Prior()).mean, rel=0.75)
    assert rate.faded(sick, 1.0).mean == pytest.approx(sick.mean)
    assert rate.fading(-5, 720) == 1


def test_a_good_stretch_makes_the_estimate_fall() -> None:
    belief = rate.fresh(Prior())
    means = [rate.exposed(belief, hours).mean for hours in (0, 10, 100, 1000, 10_000, 100_000)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 2e-5


def test_a_pool_is_a_prior_for_the_next_job() -> None:
    belief = history(rate.fresh(Prior()), 1 / 500, 40, random.Random(2))
    prior = rate.prior_from(belief)
    assert prior.events == pytest.approx(2.5) and prior.events / prior.hours == pytest.approx(belief.mean)
    quiet = rate.prior_from(rate.exposed(rate.fresh(Prior()), 1e7))
    assert quiet.hours == rate.MOST_PRIOR_HOURS


@given(st.lists(st.tuples(st.floats(0, 1e12), st.integers(0, 3), st.floats(0, 1)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_never_absurd_and_always_storable(story: list[tuple[float, int, float]]) -> None:
    belief = rate.fresh(Prior())
    for hours, events, factor in story:
        belief = rate.faded(rate.exposed(belief, hours), factor)
        for _ in range(events):
            belief = rate.happened(belief)
    assert 0 < belief.mean < math.inf
    low, high = belief.credible()
    assert 0 <= low <= high < math.inf
    assert len(belief.hours) <= rate.MOST_RUNS
    assert math.fsum(map(math.exp, belief.log_weights)) == pytest.approx(1)
    assert codec.loads(Rate, codec.dumps(belief)) == belief


@pytest.mark.parametrize("prior", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_what_is_no_prior_is_refused(prior: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Prior(events=prior[0], hours=prior[1])


def test_three_of_three_do_not_mean_always() -> None:
    assert Share().mean == 0.5
    assert Share(successes=3).mean == 0.8
    low, high = Share(successes=4, failures=1).credible()
    assert 0.4 < low < Share(successes=4, failures=1).mean < high < 0.95
    assert rate.faded_share(Share(successes=4, failures=2), 0.5) == Share(successes=2, failures=1)


def test_credible_interval_of_a_share_covers() -> None:
    rng = random.Random(9)
    inside = 0
    for _ in range(400):
        truth = rng.random()
        successes = sum(rng.random() < truth for _ in range(12))
        low, high = Share(successes=successes, failures=12 - successes).credible(0.9)
        inside += low <= truth <= high
    assert inside / 400 == pytest.approx(0.9, abs=0.045)
