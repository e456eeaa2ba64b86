"""Two kinds of save: the closed form against the linear system it solves, the optimum against scipy and dice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from lastwords_operator.core.interval import levels
from lastwords_operator.core.interval.levels import Level, Pattern


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


CHEAP = st.builds(
    Level, cost_seconds=log_floats(0.01, 30), mtbf_seconds=log_floats(600, 1e6), recovery_seconds=st.floats(0, 300)
)
DEAR = st.builds(
    Level, cost_seconds=log_floats(0.1, 300), mtbf_seconds=log_floats(3600, 1e7), recovery_seconds=st.floats(0, 900)
)


def by_linear_system(pattern: Pattern, cheap: Level, dear: Level) -> float:
    """Efficiency from the expected times of all segments, solved as a matrix."""
    rate, count = cheap.rate + dear.rate, pattern.count
    matrix, right = np.eye(count), np.zeros(count)
    for i in range(count):
        seconds = pattern.work_seconds + cheap.cost_seconds + (dear.cost_seconds if i == count - 1 else 0)
        well = math.exp(-rate * seconds)
        again, restart = (1 - well) * cheap.rate / rate, (1 - well) * dear.rate / rate
        right[i] = (1 - well) / rate + again * cheap.recovery_seconds + restart * dear.recovery_seconds
        matrix[i, i] -= again
        matrix[i, 0] -= restart
        if i + 1 < count:
            matrix[i, i + 1] -= well
    return float(count * pattern.work_seconds / np.linalg.solve(matrix, right)[0])


@given(CHEAP, DEAR, log_floats(10, 3000), st.integers(1, 30))
def test_closed_form_is_the_linear_system(cheap: Level, dear: Level, work: float, count: int) -> None:
    pattern = Pattern(work_seconds=work, count=count)
    wanted = by_linear_system(pattern, cheap, dear)
    assert levels.efficiency(pattern, cheap, dear) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


@given(CHEAP, DEAR)
@settings(max_examples=25, deadline=None)
def test_exact_is_the_optimum(cheap: Level, dear: Level) -> None:
    found = levels.exact(cheap, dear)
    best = levels.efficiency(found, cheap, dear)
    for count in {max(1, found.count - 3), max(1, found.count // 2), found.count, found.count + 2, found.count * 2}:
        other = optimize.minimize_scalar(
            lambda log, n=count: -levels.efficiency(Pattern(work_seconds=math.exp(log), count=n), cheap, dear),
            bounds=(math.log(found.work_seconds) - 3, math.log(found.work_seconds) + 3), method="bounded",
        )  # fmt: skip
        assert best >= -other.fun * (1 - 1e-7)


@given(CHEAP, DEAR)
@settings(max_examples=40, deadline=None)
def test_first_order_costs_little_where_costs_are_small(cheap: Level, dear: Level) -> None:
    if cheap.cost_seconds < cheap.mtbf_seconds / 300 and dear.cost_seconds < dear.mtbf_seconds / 300:
        first = levels.efficiency(levels.first_order(cheap, dear), cheap, dear)
        assert levels.efficiency(levels.exact(cheap, dear), cheap, dear) - first < 2e-3


def test_a_level_that_cures_nothing_is_as_rare_as_can_be() -> None:
    never = Level(cost_seconds=1, mtbf_seconds=math.inf)
    dear = Level(cost_seconds=60, mtbf_seconds=86400)
    assert levels.first_order(never, dear).count == 1
    assert levels.first_order(
        Level(cost_seconds=1, mtbf_seconds=7200), Level(cost_seconds=60, mtbf_seconds=math.inf)
    ) == (Pattern(work_seconds=pytest.approx(120, rel=1e-3), count=levels.MOST_PER_PATTERN))
    free = levels.first_order(Level(cost_seconds=0, mtbf_seconds=7200), dear)
    assert free.count * free.work_seconds == pytest.approx(math.sqrt(2 * 60 * 86400), rel=1e-3)
    assert (
        levels.first_order(Level(cost_seconds=0, mtbf_seconds=1), Level(cost_seconds=0, mtbf_seconds=1)).work_seconds
        == 0
    )
    assert levels.first_order(never, Level(cost_seconds=60, mtbf_seconds=math.inf)).work_seconds == math.inf


@given(st.floats(0, 1e300), st.floats(1e-300, 1e300), st.floats(0, 1e300), st.floats(1e-300, 1e300))
@settings(deadline=None)
def test_never_nan_at_absurd_inputs(c1: float, m1: float, c2: float, m2: float) -> None:
    cheap, dear = Level(cost_seconds=c1, mtbf_seconds=m1), Level(cost_seconds=c2, mtbf_seconds=m2)
    pattern = levels.first_order(cheap, dear)
    assert pattern.work_seconds >= 0 and 1 <= pattern.count <= levels.MOST_PER_PATTERN
    assert 0 <= levels.efficiency(pattern, cheap, dear) <= 1


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_what_is_no_level_is_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="a level needs"):
        Level(cost_seconds=cost, mtbf_seconds=1)
    with pytest.raises(ValueError, match="a level needs"):
        Level(cost_seconds=1, mtbf_seconds=-1)


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        (Level(cost_seconds=1, mtbf_seconds=14400, recovery_seconds=60),
         Level(cost_seconds=60, mtbf_seconds=86400, recovery_seconds=300)),
        (Level(cost_seconds=5, mtbf_seconds=1800, recovery_seconds=60),
         Level(cost_seconds=60, mtbf_seconds=7200, recovery_seconds=600)),
    ],
    ids=["D1", "sick"],
)  # fmt: skip
def test_efficiency_is_what_dice_give(cheap: Level, dear: Level) -> None:
    """Patterns by throwing dice, within two standard errors."""
    rng = np.random.default_rng(11)
    pattern = levels.exact(cheap, dear)
    patterns = 60_000
    rate, count = cheap.rate + dear.rate, pattern.count
    time, at = np.zeros(patterns), np.zeros(patterns, dtype=int)
    open_ = np.arange(patterns)
    while open_.size:
        needed = pattern.work_seconds + cheap.cost_seconds + np.where(at[open_] == count - 1, dear.cost_seconds, 0)
        strike = rng.exponential(1 / rate, open_.size)
        struck = strike < needed
        deep = rng.random(open_.size) < dear.rate / rate
        time[open_] += np.where(struck, strike + np.where(deep, dear.recovery_seconds, cheap.recovery_seconds), needed)
        at[open_] = np.where(struck, np.where(deep, 0, at[open_]), at[open_] + 1)
        open_ = open_[at[open_] < count]
    eta = count * pattern.work_seconds / time.mean()
    error = eta * time.std() / time.mean() / math.sqrt(patterns)
    assert levels.efficiency(pattern, cheap, dear) == pytest.approx(eta, abs=2 * error)
