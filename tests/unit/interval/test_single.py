"""The formulas for one kind of save against a numeric minimiser and against a simulation of what they model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from lastwords_operator.core.interval import single


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


COSTS = log_floats(1e-3, 1e4)
MTBFS = log_floats(1.0, 1e9)


def best_of(costs: single.Costs, guess: float) -> float:
    """Highest efficiency anywhere, by scipy."""
    found = optimize.minimize_scalar(
        lambda log: -single.efficiency(math.exp(log), costs),
        bounds=(math.log(guess) - 5, math.log(guess) + 5), method="bounded", options={"xatol": 1e-9},
    )  # fmt: skip
    return -float(found.fun)


@given(COSTS, MTBFS, st.floats(0, 0.3))
def test_exact_is_the_optimum_over_the_whole_range(cost: float, mtbf: float, recovery_share: float) -> None:
    costs = single.Costs(save_seconds=cost, mtbf_seconds=mtbf, recovery_seconds=recovery_share * mtbf)
    found = single.exact(cost, mtbf)
    assert 0 < found <= mtbf
    assert single.efficiency(found, costs) >= best_of(costs, found) * (1 - 1e-9)


@given(COSTS, MTBFS)
def test_exact_solves_its_equation(cost: float, mtbf: float) -> None:
    """(1 - u) exp(u + x) = 1, in logarithms, so that neither end of the range hides an error."""
    u, x = single.exact(cost, mtbf) / mtbf, cost / mtbf
    if u > 1e-4 and x < 15:
        assert math.log1p(-u) + u + x == pytest.approx(0, abs=1e-9 * max(1.0, x))
    elif x < 15:
        assert u == pytest.approx(math.sqrt(2 * x) - 2 * x / 3, rel=1e-6)


@given(COSTS, MTBFS)
def test_approximations_are_as_good_as_they_say(cost: float, mtbf: float) -> None:
    exact = single.exact(cost, mtbf)
    if cost <= mtbf / 3:
        assert single.daly(cost, mtbf) == pytest.approx(exact, rel=3.2e-3)
    costs = single.Costs(save_seconds=cost, mtbf_seconds=mtbf)
    if cost < mtbf / 100:
        best = single.efficiency(exact, costs)
        assert 1 / single.efficiency(single.young(cost, mtbf), costs) - 1 / best < 1e-3


@given(COSTS, MTBFS)
def test_young_is_where_the_plain_loss_is_least(cost: float, mtbf: float) -> None:
    costs = single.Costs(save_seconds=cost, mtbf_seconds=mtbf, recovery_seconds=60)
    best = single.young(cost, mtbf)
    least = single.plain_loss(best, costs)
    assert all(single.plain_loss(best * factor, costs) >= least for factor in (0.5, 0.99, 1.01, 2))


@given(COSTS, log_floats(10, 1e8), st.floats(0.01, 0.99), st.floats(0, 0.1))
@settings(max_examples=60)
def test_optimum_with_last_words(cost: float, mtbf: float, kept: float, recovery_share: float) -> None:
    costs = single.Costs(
        save_seconds=min(cost, mtbf), mtbf_seconds=mtbf, recovery_seconds=recovery_share * mtbf, kept=kept,
        last_words_seconds=20, residual_seconds=min(1.0, mtbf / 1e3),
    )  # fmt: skip
    found = single.exact_with_last_words(costs)
    assert single.efficiency(found, costs) >= best_of(costs, found) * (1 - 1e-9)


@given(COSTS, log_floats(1e4, 1e9), st.floats(0, 0.99))
def test_first_order_with_last_words_costs_almost_nothing(cost: float, mtbf: float, kept: float) -> None:
    costs = single.Costs(save_seconds=min(cost, mtbf / 1000), mtbf_seconds=mtbf, kept=kept)
    best = single.efficiency(single.exact_with_last_words(costs), costs)
    first = single.with_last_words(costs.save_seconds, [(1 / mtbf, kept)])
    assert 1 / single.efficiency(first, costs) - 1 / best < 4e-4


@pytest.mark.parametrize(
    ("cost", "mtbf", "interval"),
    [(0.0, 100.0, 0.0), (0.0, math.inf, 0.0), (5.0, math.inf, math.inf), (1e300, 1e-300, 1e-300), (1e-300, 1e300, 1.0)],
)
def test_ends_of_the_range(cost: float, mtbf: float, interval: float) -> None:
    for formula in (single.young, single.daly, single.exact):
        found = formula(cost, mtbf)
        assert not math.isnan(found) and found >= 0
    assert single.exact(cost, mtbf) == pytest.approx(interval, rel=0.5)


@given(st.floats(0, 1e300), st.floats(1e-300, 1e300), st.floats(0, 1), st.floats(1e-300, 1e300))
def test_never_nan_at_absurd_inputs(cost: float, mtbf: float, kept: float, interval: float) -> None:
    costs = single.Costs(save_seconds=cost, mtbf_seconds=mtbf, recovery_seconds=cost, kept=kept)
    for value in (single.young(cost, mtbf), single.daly(cost, mtbf), single.exact(cost, mtbf)):
        assert value >= 0
    assert single.exact_with_last_words(costs) >= 0
    assert 0 <= single.efficiency(interval, costs) <= 1 + 1e-9


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_cost_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="save cost must be finite"):
        single.exact(value, 100)
    with pytest.raises(ValueError, match="finite and not negative"):
        single.Costs(save_seconds=1, mtbf_seconds=1, recovery_seconds=value)
    with pytest.raises(ValueError, match="between 0 and 1"):
        single.Costs(save_seconds=1, mtbf_seconds=1, kept=value if value < 0 else 1.5)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_what_is_no_mtbf_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        single.young(1, value)


def simulated(interval: float, costs: single.Costs, rng: np.random.Generator) -> tuple[float, float]:
    """
    (efficiency, standard error) of the model by throwing dice: up-times, saves that become durable, last words, and
    recoveries that are struck themselves and begin again.
    """
    count = 150_000
    mtbf = costs.mtbf_seconds
    up = rng.exponential(mtbf, count)
    period = interval + costs.save_seconds
    # The save after the j-th interval began at j * interval + (j - 1) * cost and was durable a while later.
    durable = np.maximum(0, np.floor((up - interval - costs.durable) / period) + 1) * interval
    kept = rng.random(count) < costs.kept
    within = up % period
    done = np.floor(up / period) * interval + np.minimum(within, interval)
    work = np.where(kept, done - costs.residual_seconds, durable)
    recovery, waiting = np.zeros(count), np.ones(count, dtype=bool)
    while waiting.any():
        strike = rng.exponential(mtbf, count)
        recovery += np.where(waiting, np.minimum(strike, costs.recovery_seconds), 0)
        waiting &= strike < costs.recovery_seconds
    time = up + recovery + np.where(kept, costs.last_words_seconds, 0)
    eta = work.sum() / time.sum()
    return float(eta), float(np.std(work - eta * time) / math.sqrt(count) / time.mean())


@pytest.mark.parametrize(
    "costs",
    [
        single.Costs(save_seconds=300, mtbf_seconds=900, recovery_seconds=600),
        single.Costs(save_seconds=200, mtbf_seconds=11135, recovery_seconds=600),
        single.Costs(save_seconds=0.59, mtbf_seconds=11135, recovery_seconds=130, durable_seconds=51),
        single.Costs(save_seconds=6.3, mtbf_seconds=28440, kept=0.8, last_words_seconds=30, residual_seconds=1),
        single.Costs(save_seconds=200, mtbf_seconds=11135, recovery_seconds=600, kept=0.9, last_words_seconds=200),
    ],
    ids=["daly", "blocking", "overlapped", "last-words", "dear"],
)
def test_efficiency_is_what_dice_give(costs: single.Costs) -> None:
    """Within two standard errors at the optimum; at 0.6 and 1.7 times it the dice give less."""
    rng = np.random.default_rng(7)
    best = single.exact_with_last_words(costs)
    eta, error = simulated(best, costs, rng)
    assert single.efficiency(best, costs) == pytest.approx(eta, abs=2 * error)
    assert all(simulated(best * factor, costs, rng)[0] < eta for factor in (0.6, 1.7))
