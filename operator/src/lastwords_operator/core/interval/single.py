"""
The interval where there is one kind of save: the loss of time, and where it is least.

All times in seconds. Costs and recovery times must be finite and not negative, the mean time between failures above 0;
infinity there means "never". With nothing to pay the interval is 0, with nothing to fear it is infinite: the caller
applies bounds (`bounds`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lastwords_operator.core import numeric

_FIRST_ORDER_IS_EXACT = 1e-30
"""Cost / MTBF below which the next order is beyond the last digit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What the loss depends on, beside the interval. `ValueError` for what is no time or no share."""

    save_seconds: float
    """Training time that one save takes from the loop; of one that overlaps with training see `overlapped`."""
    mtbf_seconds: float
    """Mean time between failures of the whole job."""
    recovery_seconds: float = 0.0
    """From a failure to the first new step, without the work that is done again."""
    durable_seconds: float | None = None
    """From the beginning of a save until it can be restored from; None: when the save ends."""
    kept: float = 0.0
    """Share of failures in which last words keep the state."""
    last_words_seconds: float = 0.0
    """What keeping it takes."""
    residual_seconds: float = 0.0
    """Work that is lost although it was kept: the step under way."""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _check(self.save_seconds, self.mtbf_seconds)
        times = (self.recovery_seconds, self.durable, self.last_words_seconds, self.residual_seconds)
        if not all(0 <= time < math.inf for time in times):
            raise ValueError(f"times must be finite and not negative: {times}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"the share of failures with last words is between 0 and 1, not {self.kept}")

    @property
    def durable(self) -> float:
        """Seconds from the beginning of a save until it can be restored from."""
        return self.save_seconds if self.durable_seconds is None else self.durable_seconds


def plain_loss(interval: float, costs: Costs) -> float:
    """
    Share of the time that is lost by the plain account: save cost / interval + (interval / 2 + recovery) / MTBF.

    The account of Young 1974. Assumes that failures come singly, half an interval is lost on average, and no failure
    strikes a save or a recovery. Above 1 it says only "hopeless".
    """
    return costs.save_seconds / interval + (interval / 2 + costs.recovery_seconds) / costs.mtbf_seconds


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """
    Where the plain loss is least: sqrt(2 o M). The named baseline.

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. Good while the cost is
    below a hundredth of the MTBF.
    """
    _check(save_seconds, mtbf_seconds)
    return math.sqrt(2 * save_seconds) * math.sqrt(mtbf_seconds) if save_seconds else 0.0


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """
    Daly's higher order interval: sqrt(2oM) (1 + sqrt(o/2M)/3 + (o/2M)/9) - o, or M where o >= 2M.

    Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 22(3), 2006, equation 37. Assumes
    exponential failures, also during saves and recoveries. Within 0.3 % of the exact optimum while o <= M/3.
    """
    _check(save_seconds, mtbf_seconds)
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    x = save_seconds / (2 * mtbf_seconds)
    return young(save_seconds, mtbf_seconds) * (1 + math.sqrt(x) / 3 + x / 9) - save_seconds


def exact(save_seconds: float, mtbf_seconds: float) -> float:
    """
    The interval with the highest `efficiency` without last words: the root of (1 - t/M) exp((t+o)/M) = 1, that is
    M (1 + W0(-exp(-1 - o/M))) with Lambert's W. Recovery and time to durable do not move it.

    Daly 2006 (cost function), Vaidya 1997, IEEE TC 46(8) (latency drops out). Assumes exponential failures, also
    during saves and recoveries, and saves of constant cost. Solved by Newton's method in u = t/M, in a form that
    stays exact for small costs.
    """
    _check(save_seconds, mtbf_seconds)
    x = save_seconds / mtbf_seconds
    if x < _FIRST_ORDER_IS_EXACT:
        return young(save_seconds, mtbf_seconds)
    if x > 1:
        rest = math.exp(-1 - x)
        for _ in range(60):
            rest = math.exp(rest - 1 - x)
        return mtbf_seconds * (1 - rest)
    u = daly(x, 1.0)
    for _ in range(20):
        if u <= 0:
            return 0.0
        step = (_excess(u) - x) * (1 - u) / u
        u -= step
        if abs(step) <= 1e-15 * u:
            break
    return mtbf_seconds * u


def overlapped(stall_seconds: float, slowdown: float, durable_seconds: float) -> float:
    """
    Save cost of a save that overlaps with training: stall + slowdown * (time to durable - stall). `slowdown` is the
    share by which training is slower while the copy and the write run.

    First order bookkeeping: lost training time is what counts, whenever it is lost (Vaidya 1997).
    """
    return stall_seconds + slowdown * max(0.0, durable_seconds - stall_seconds)


def losing_mtbf(classes: Sequence[tuple[float, float]]) -> float:
    """
    Mean time between failures that lose work: 1 / sum(rate * (1 - p)) over fault classes (failures per second, share
    p in which last words keep the state). Independent Poisson classes, thinned.
    """
    losing = sum(rate * (1 - kept) for rate, kept in classes)
    return 1 / losing if losing > 0 else math.inf


def with_last_words(save_seconds: float, classes: Sequence[tuple[float, float]]) -> float:
    """
    First order interval where last words keep the state in some failures: sqrt(2 o / sum(rate * (1 - p))).

    Young's argument with the failures that lose work. Within 0.02 % of the least loss while the cost is small against
    the MTBF; take `daly` where nothing is ever kept. The correction of `daly` has the wrong sign here: the exact
    optimum is longer.
    """
    return young(save_seconds, losing_mtbf(classes))


def efficiency(interval: float, costs: Costs) -> float:
    """
    Share of the time that becomes lasting work in the long run (goodput), between 0 and 1.

    Renewal argument over exponential failures, which also strike saves and recoveries (Daly 2006). State kept by last
    words is a new durable point, so that each failure begins a new renewal; what is not kept goes back to the newest
    durable save.
    """
    if interval <= 0:
        return 0.0
    mtbf, cost, p = costs.mtbf_seconds, costs.save_seconds, costs.kept
    if math.isinf(mtbf):
        return interval / (interval + cost)
    if costs.recovery_seconds / mtbf > 700:
        return 0.0
    ended = -math.expm1(-(interval + cost) / mtbf)
    if ended <= 0:
        return 0.0
    gain = (1 - p) * interval * math.exp(-(interval + costs.durable) / mtbf) / ended
    if p:
        gain += p * max(0.0, -math.expm1(-interval / mtbf) * mtbf / ended - costs.residual_seconds)
    time = mtbf * math.exp(costs.recovery_seconds / mtbf) + p * costs.last_words_seconds
    return min(1.0, gain / time)


def exact_with_last_words(costs: Costs) -> float:
    """
    The interval with the highest `efficiency`, by golden section; `exact` where nothing is kept.

    There is no closed form. Infinite where every failure is kept: then saves are a pure loss, and bounds must decide.
    """
    if costs.kept == 0 or costs.save_seconds == 0:
        return exact(costs.save_seconds, costs.mtbf_seconds)
    if costs.kept >= 1 or math.isinf(costs.mtbf_seconds):
        return math.inf
    guess = young(costs.save_seconds, costs.mtbf_seconds / (1 - costs.kept))
    return numeric.minimise(lambda interval: -efficiency(interval, costs), guess / 100, guess * 100)


def _excess(u: float) -> float:
    """-u - log(1 - u), without cancellation for small u."""
    if u > 0.1:
        return -u - math.log1p(-u)
    total, power = 0.0, u * u
    for k in range(2, 20):
        total += power / k
        power *= u
    return total


def _check(save_seconds: float, mtbf_seconds: float) -> None:
    if not 0 <= save_seconds < math.inf:
        raise ValueError(f"a save cost must be finite and not negative, not {save_seconds}")
    if not mtbf_seconds > 0:
        raise ValueError(f"a mean time between failures must be above 0, not {mtbf_seconds}")
