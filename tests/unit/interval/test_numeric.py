"""Distribution functions and quantiles against scipy, over the whole range that the tuner can meet."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from lastwords_operator.core import numeric

SHAPES = st.floats(math.log(1e-2), math.log(1e7)).map(math.exp)
MODERATE = st.floats(math.log(0.05), math.log(1e5)).map(math.exp)
AT_LEAST_HALF = st.floats(math.log(0.5), math.log(1e5)).map(math.exp)
PROBABILITIES = st.floats(1e-3, 1 - 1e-3)


@given(SHAPES, st.floats(-12, 12))
def test_gamma_distribution(shape: float, deviation: float) -> None:
    x = max(1e-9, shape + deviation * math.sqrt(shape))
    assert numeric.gamma_cdf(shape, x) == pytest.approx(special.gammainc(shape, x), abs=1e-7)


@given(MODERATE, PROBABILITIES)
def test_gamma_quantile(shape: float, probability: float) -> None:
    wanted = special.gammaincinv(shape, probability)
    assert numeric.gamma_quantile(shape, probability) == pytest.approx(wanted, rel=1e-6, abs=1e-250)


@given(MODERATE, MODERATE, st.floats(0, 1))
def test_beta_distribution(a: float, b: float, x: float) -> None:
    assert numeric.beta_cdf(a, b, x) == pytest.approx(special.betainc(a, b, x), abs=1e-7)


@given(AT_LEAST_HALF, AT_LEAST_HALF, PROBABILITIES)
def test_beta_quantile(a: float, b: float, probability: float) -> None:
    assert special.betainc(a, b, numeric.beta_quantile(a, b, probability)) == pytest.approx(probability, abs=1e-6)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, math.nan])
def test_a_quantile_needs_a_probability(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        numeric.gamma_quantile(2.0, probability)
    with pytest.raises(ValueError, match="between 0 and 1"):
        numeric.beta_quantile(2.0, 2.0, probability)


def test_outside_its_domain_a_distribution_is_flat_or_refused() -> None:
    assert (numeric.gamma_cdf(2, -1), numeric.gamma_cdf(2, math.inf)) == (0, 1)
    assert (numeric.beta_cdf(2, 2, -1), numeric.beta_cdf(2, 2, 2)) == (0, 1)
    with pytest.raises(ValueError, match="shape above 0"):
        numeric.gamma_cdf(0, 1)
    with pytest.raises(ValueError, match="shapes above 0"):
        numeric.beta_cdf(1, -1, 0.5)


@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_minimiser(where: float, width: float) -> None:
    least = math.exp(where)
    found = numeric.minimise(lambda x: (math.log(x) - where) ** 2 * width, least / 50, least * 200)
    assert found == pytest.approx(least, rel=1e-6)
