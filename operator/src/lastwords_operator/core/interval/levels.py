"""
The intervals where there are two kinds of save: a cheap one (a snapshot in memory) that cures most failures, and a
dear one (a checkpoint in storage) that cures all. Every dear save is also a cheap one.
"""

from __future__ import annotations

import dataclasses
import math

from lastwords_operator.core import numeric

MOST_PER_PATTERN = 100_000
"""More cheap saves than that for each dear one are not asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """One kind of save. `mtbf_seconds`: mean time between failures that need this level (infinite: none)."""

    cost_seconds: float
    mtbf_seconds: float
    recovery_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        if not (0 <= self.cost_seconds < math.inf and 0 <= self.recovery_seconds < math.inf and self.mtbf_seconds > 0):
            raise ValueError(f"a level needs finite times that are not negative and an MTBF above 0: {self}")

    @property
    def rate(self) -> float:
        """Failures per second that need this level."""
        return 1 / self.mtbf_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """`count` segments of `work_seconds` useful work, a cheap save after each, a dear one after the last."""

    work_seconds: float
    count: int


def first_order(cheap: Level, dear: Level) -> Pattern:
    """
    n = sqrt(C2 l1 / (C1 l2)) cheap saves per dear one, rounded to the better integer, and
    W = sqrt(2 (C1 + C2/n) / (l1 + n l2)).

    Benoit, Cavelan, Le Fèvre, Robert, Sun, "Towards optimal multi-level checkpointing", IEEE TC 66(7), 2017. Assumes
    independent Poisson failures per level and costs small against both MTBFs. The work is 0 where both saves are
    free, and infinite where no failure loses work.
    """
    if cheap.rate == 0 or dear.cost_seconds == 0:
        ideal = 1.0
    elif dear.rate == 0 or cheap.cost_seconds == 0:
        # Free snapshots are taken as often as there are steps; how many that is only the caller knows.
        ideal = float(MOST_PER_PATTERN)
    else:
        ideal = math.sqrt(dear.cost_seconds / cheap.cost_seconds) * math.sqrt(cheap.rate / dear.rate)
    low = math.floor(min(float(MOST_PER_PATTERN), max(1.0, ideal)))
    counts = (low, min(MOST_PER_PATTERN, low + 1))
    count = min(counts, key=lambda n: (cheap.cost_seconds + dear.cost_seconds / n) * (cheap.rate + n * dear.rate))
    return Pattern(work_seconds=_work(cheap, dear, count), count=count)


def efficiency(pattern: Pattern, cheap: Level, dear: Level) -> float:
    """
    Share of the time that becomes lasting work in the long run, between 0 and 1: work of a pattern / its expected
    time.

    The expected times E_i from the beginning of segment i form a linear system: a segment ends well, or a failure of
    level 1 leads back to its beginning, or one of level 2 to the beginning of the pattern. All segments but the last
    being alike, it solves in closed form. Assumes exponential failures, none of them during a recovery.
    """
    rate = cheap.rate + dear.rate
    work, count = pattern.work_seconds, pattern.count
    if work <= 0:
        return 0.0
    segment = work + cheap.cost_seconds
    if rate == 0 or math.isinf(work):
        return work / (segment + dear.cost_seconds / count) if math.isfinite(work) else float(rate == 0)
    if (segment + dear.cost_seconds) * rate > 700:
        return 0.0
    through, time = _segment(segment, cheap, dear)
    through_last, time_last = _segment(segment + dear.cost_seconds, cheap, dear)
    log_before = (count - 1) * math.log(through)
    if log_before < -700:
        return 0.0
    before = math.exp(log_before)
    repeats = -math.expm1(log_before) / (1 - through) if through < 1 else float(count - 1)
    return count * work * before * through_last / (time * repeats + before * time_last)


def exact(cheap: Level, dear: Level) -> Pattern:
    """
    The pattern with the highest `efficiency`: golden section over the work, for the counts around the first order's.

    Needs both levels to cost something and to be needed; `first_order` answers the rest.
    """
    start = first_order(cheap, dear)
    if not (cheap.cost_seconds and dear.cost_seconds and cheap.rate and dear.rate):
        return start

    def best(count: int) -> tuple[float, Pattern]:
        guess = _work(cheap, dear, count)
        work = numeric.minimise(
            lambda w: -efficiency(Pattern(work_seconds=w, count=count), cheap, dear), guess / 20, guess * 4
        )
        pattern = Pattern(work_seconds=work, count=count)
        return efficiency(pattern, cheap, dear), pattern

    found = best(start.count)
    for direction in (1, -1):
        while 1 <= found[1].count + direction <= MOST_PER_PATTERN:
            following = best(found[1].count + direction)
            if following[0] <= found[0]:
                break
            found = following
    return found[1]


def _work(cheap: Level, dear: Level, count: int) -> float:
    rate = cheap.rate + count * dear.rate
    cost = cheap.cost_seconds + dear.cost_seconds / count
    if cost == 0:
        return 0.0
    return math.sqrt(2 * cost / rate) if rate else math.inf


def _segment(seconds: float, cheap: Level, dear: Level) -> tuple[float, float]:
    """(share of beginnings that end well before a failure of level 2, expected seconds until either)."""
    rate = cheap.rate + dear.rate
    well = math.exp(-seconds * rate)
    failed = -math.expm1(-seconds * rate)
    again = failed * cheap.rate / rate
    restart = failed * dear.rate / rate
    once = failed / rate + again * cheap.recovery_seconds + restart * dear.recovery_seconds
    return well / (1 - again), once / (1 - again)
