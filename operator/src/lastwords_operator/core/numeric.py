"""
Small numerical tools that the standard library lacks: distribution functions of gamma and beta with their inverses,
and a minimiser. Made for display and control (absolute error of a distribution function below 1e-9), not for tails
beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TINY = 1e-300
_EXACT_SHAPE = 1e5
"""Above it the series needs too many terms, and the cube-root law of Wilson and Hilferty is exact enough."""
_MOST_TERMS = 20_000
_GOLDEN = (math.sqrt(5) - 1) / 2


def gamma_cdf(shape: float, x: float) -> float:
    """
    P(X <= x) for X ~ Gamma(shape, rate 1): the regularised lower incomplete gamma function. Series below the mean,
    Lentz's continued fraction above it (Abramowitz and Stegun 6.5.29 and 6.5.31).
    """
    if shape <= 0 or math.isnan(shape) or math.isnan(x):
        raise ValueError(f"a gamma distribution needs a shape above 0 and a number, not {shape} and {x}")
    if x <= 0:
        return 0.0
    if math.isinf(x):
        return 1.0
    if shape > _EXACT_SHAPE:
        spread = 1 / (9 * shape)
        return _normal_cdf(((x / shape) ** (1 / 3) - 1 + spread) / math.sqrt(spread))
    front = _exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for n in range(1, _MOST_TERMS):
            term *= x / (shape + n)
            total += term
            if term < total * 1e-16:
                break
        return min(1.0, front * total)
    return max(0.0, 1 - front * _gamma_fraction(shape, x))


def gamma_quantile(shape: float, probability: float) -> float:
    """The x with `gamma_cdf(shape, x) == probability`, for a probability strictly between 0 and 1."""
    _check_probability(probability)

    def density(t: float) -> float:
        return _exp(shape * t - math.exp(t) - math.lgamma(shape))

    start = math.log(shape) if shape > 1 else math.log(probability * math.gamma(shape + 1)) / shape
    found = invert(lambda t: gamma_cdf(shape, math.exp(t)), density, probability, max(-690.0, start))
    return math.exp(found)


def beta_cdf(a: float, b: float, x: float) -> float:
    """
    P(X <= x) for X ~ Beta(a, b): the regularised incomplete beta function by its continued fraction (Abramowitz and
    Stegun 26.5.8), on the side where it converges fast.
    """
    if not (a > 0 and b > 0) or math.isnan(x):
        raise ValueError(f"a beta distribution needs two shapes above 0 and a number, not {a}, {b} and {x}")
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = _exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return min(1.0, front * _beta_fraction(a, b, x) / a)
    return max(0.0, 1 - front * _beta_fraction(b, a, 1 - x) / b)


def beta_quantile(a: float, b: float, probability: float) -> float:
    """The x with `beta_cdf(a, b, x) == probability`, for a probability strictly between 0 and 1."""
    _check_probability(probability)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)

    def density(t: float) -> float:
        return _exp(front + a * -_softplus(-t) + b * -_softplus(t))

    found = invert(lambda t: beta_cdf(a, b, _logistic(t)), density, probability, math.log(a / b))
    return _logistic(found)


def invert(cdf: Callable[[float], float], density: Callable[[float], float], probability: float, start: float) -> float:
    """
    The t in [-690, 690] where an increasing `cdf` reaches `probability`: Newton's steps, kept inside a bracket that
    only shrinks, so that a bad `start` costs time and nothing else.
    """
    low, high = -690.0, 690.0
    t = min(high, max(low, start))
    for _ in range(200):
        error = cdf(t) - probability
        if error > 0:
            high = t
        else:
            low = t
        slope = density(t)
        step = t - error / slope if slope > 1e-12 else math.nan
        following = step if low < step < high else (low + high) / 2
        if abs(following - t) <= 1e-11 * max(1.0, abs(t)):
            return following
        t = following
    return t


def minimise(loss: Callable[[float], float], low: float, high: float) -> float:
    """
    Where a function with one minimum in [low, high], both above 0, is least: golden section over the logarithm, to a
    relative error of about 1e-7 (the flat bottom of a minimum allows no better).
    """
    left, right = math.log(low), math.log(high)
    a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
    loss_a, loss_b = loss(math.exp(a)), loss(math.exp(b))
    while right - left > 1e-8:
        if loss_a <= loss_b:
            right, b, loss_b = b, a, loss_a
            a = right - _GOLDEN * (right - left)
            loss_a = loss(math.exp(a))
        else:
            left, a, loss_a = a, b, loss_b
            b = left + _GOLDEN * (right - left)
            loss_b = loss(math.exp(b))
    return math.exp((left + right) / 2)


def _gamma_fraction(shape: float, x: float) -> float:
    b = x + 1 - shape
    c = 1 / _TINY
    d = 1 / b if b else 1 / _TINY
    total = d
    for n in range(1, _MOST_TERMS):
        numerator = -n * (n - shape)
        b += 2
        d = 1 / _off_zero(numerator * d + b)
        c = _off_zero(b + numerator / c)
        total *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return total


def _beta_fraction(a: float, b: float, x: float) -> float:
    c = 1.0
    d = 1 / _off_zero(1 - (a + b) * x / (a + 1))
    total = d
    for n in range(1, _MOST_TERMS):
        for numerator in (
            n * (b - n) * x / ((a + 2 * n - 1) * (a + 2 * n)),
            -(a + n) * (a + b + n) * x / ((a + 2 * n) * (a + 2 * n + 1)),
        ):
            d = 1 / _off_zero(1 + numerator * d)
            c = _off_zero(1 + numerator / c)
            total *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return total


def _off_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _check_probability(probability: float) -> None:
    if not 0 < probability < 1:
        raise ValueError(f"a quantile needs a probability between 0 and 1, not {probability}")


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _logistic(t: float) -> float:
    return 1 / (1 + math.exp(-t)) if t > -700 else 0.0


def _softplus(t: float) -> float:
    return max(t, 0.0) + math.log1p(math.exp(-abs(t)))
