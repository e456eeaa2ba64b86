"""
The control law: from what saves cost and how often what fails, every how many steps to take a snapshot, and how many
of them go to storage.

    snapshot   every W1 of work: cures what leaves the memory of a worker or of its neighbours
    checkpoint every W2 of work: cures the rest

Both intervals are those of least expected loss (`interval.levels`; with one level `interval.single`), from posterior
means. They are kept within bounds, and follow slowly (`interval.bounds`). Called with measurements of any quality:
what is missing or absurd is treated as unknown, and never makes a plan absurd.
"""

from __future__ import annotations

import dataclasses
import math

from lastwords_operator.core.incidents import Risk
from lastwords_operator.core.interval import bounds, levels, single

DURABLE_MARGIN = 1.25
"""A checkpoint begins only after this many times the time that one takes, so that two are never in flight."""
DURABLE_UNKNOWN_SECONDS = 60.0
"""How long a checkpoint is believed to take before one was committed."""
EXPENSIVE_SHARE = 0.1
STUCK_CHANCE = 1e-4
"""
Restarts in a row without progress that are less likely than this, by what is believed of the rate, disprove the
belief: the intervals are cut each time, whatever it says. Likelier ones are common where failures come in heaps, and
cutting costs more.
"""
STUCK = "restarts in a row from one step call for saves more often"
SMOOTHING = 0.25
MOST_STEPS = 1_000_000
NOISE = 1.1
"""A plan in force may be as far outside its bounds before it is changed out of turn."""
_MOST_SECONDS = 1e9

Pair = tuple[float, float]
"""Seconds of work between two snapshots, and between two checkpoints."""
Limited = tuple[bounds.Bounds, bounds.Bounds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Smoothed measurements of a job, in seconds; slowdowns are shares by which steps take longer meanwhile."""

    step_seconds: float | None = None
    stall_seconds: float = 0.0
    """How long a snapshot stops the loop."""
    copy_seconds: float = 0.0
    """From the beginning of a snapshot until it stands in memory."""
    copy_slowdown: float = 0.0
    durable_seconds: float | None = None
    """From the beginning of a snapshot until it is committed in storage."""
    persist_slowdown: float = 0.0
    recovery_seconds: float = 0.0
    """From a failure to the first new step, all phases together."""

    @property
    def durable(self) -> float:
        """Seconds until a checkpoint is committed, as far as known."""
        known = _time(self.durable_seconds)
        return max(known, _time(self.copy_seconds)) if known else DURABLE_UNKNOWN_SECONDS

    @property
    def snapshot_cost(self) -> float:
        """Training time that a snapshot takes."""
        return single.overlapped(_time(self.stall_seconds), _time(self.copy_slowdown), _time(self.copy_seconds))

    @property
    def checkpoint_cost(self) -> float:
        """Training time that it takes more if the snapshot goes to storage."""
        return _time(self.persist_slowdown) * max(0.0, self.durable - _time(self.copy_seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InForce:
    """The plan in force. `measured` False: a default, which gives way at once."""

    every_steps: int
    persist_every: int
    changed_at: float = 0.0
    measured: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything the law depends on, beside the plan in force."""

    now: float
    measured: Measured
    risk: Risk
    failed_at: float | None = None
    """The newest failure."""
    restarts_without_progress: int = 0
    """Restarts in a row from one and the same step, after each of which there had been time enough for a save."""
    limits: bounds.Limits = dataclasses.field(default_factory=bounds.Limits)
    """What the user allows between two checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The plan that should be in force, with the reason in one sentence."""

    every_steps: int
    persist_every: int
    changed: bool
    reason: str
    expected_loss: float = 0.0
    """Share of the time that goes into saves, work done again and recoveries, by the plain account; 1 at most."""
    expensive: bool = False
    """More than a tenth of the time goes into saves: right for this failure rate, and still worth a warning."""


def smoothed(mean: float | None, value: float) -> float | None:
    """An exponentially weighted mean of measurements; what is no time changes nothing."""
    if not 0 <= value < math.inf:
        return mean
    return value if mean is None else mean + SMOOTHING * (value - mean)


def tune(situation: Situation, plan: InForce) -> Tuned:
    """The plan in force or a better one."""
    step = _time(situation.measured.step_seconds)
    if step == 0:
        return Tuned(
            every_steps=plan.every_steps, persist_every=plan.persist_every, changed=False,
            reason="No step has been measured yet, so the plan stays as it is.",
        )  # fmt: skip
    wish = _wanted(situation)
    allowed = _bounds(situation, step)
    why = _why(situation, wish, allowed)
    wish = (allowed[0].clamp(wish[0]), allowed[1].clamp(wish[1]))
    if not plan.measured:
        return _answer(situation, plan, _steps(wish, allowed, step), why)
    now = _seconds(plan, step)
    following = (bounds.limited(now[0], wish[0]), bounds.limited(now[1], wish[1]))
    steps = _steps((allowed[0].clamp(following[0]), allowed[1].clamp(following[1])), allowed, step)
    kept = (plan.every_steps, plan.persist_every)
    if _stuck(situation, now[1]):
        # An interval shorter than the save itself loses more than it can ever keep.
        cost = situation.measured.snapshot_cost, situation.measured.snapshot_cost + situation.measured.checkpoint_cost
        shorter = (max(cost[0], now[0] / bounds.SHORTER_AT_MOST), max(cost[1], now[1] / bounds.SHORTER_AT_MOST))
        steps = _steps((allowed[0].clamp(shorter[0]), allowed[1].clamp(shorter[1])), allowed, step)
        return _answer(situation, plan, steps, f"{situation.restarts_without_progress} {STUCK}")
    if _possible(allowed, now):
        then = (steps[0] * step, steps[0] * steps[1] * step)
        change = bounds.Change(
            period_seconds=now[1], changed_at=plan.changed_at, failed_at=situation.failed_at,
            loss_now=_avoidable(situation, now), loss_then=_avoidable(situation, then),
        )  # fmt: skip
        if not bounds.worth(change.loss_now, change.loss_then):
            return _answer(situation, plan, kept, f"{why}; what is in force is near enough")
        if bounds.resting(change, situation.now):
            return _answer(situation, plan, kept, f"{why}; the last change is too recent for another")
    return _answer(situation, plan, steps, why)


def _stuck(situation: Situation, period: float) -> bool:
    """Whether so many lives in a row, each shorter than a period, cannot be chance (exponential lives)."""
    losing = situation.risk.snapshot + situation.risk.storage
    return (-math.expm1(-losing * period)) ** situation.restarts_without_progress < STUCK_CHANCE


def _avoidable(situation: Situation, work: Pair) -> float:
    """Plain loss per second that depends on the intervals: saves, and work that is done again."""
    measured, risk = situation.measured, situation.risk
    saves = measured.snapshot_cost / work[0] + measured.checkpoint_cost / work[1]
    return saves + risk.snapshot * work[0] / 2 + risk.storage * work[1] / 2


def _seconds(plan: InForce, step: float) -> Pair:
    return plan.every_steps * step, plan.every_steps * plan.persist_every * step


def _possible(allowed: tuple[bounds.Bounds, ...], seconds: tuple[float, ...]) -> bool:
    """Whether intervals are within their bounds, but for the noise of a measurement."""
    pairs = zip(allowed, seconds, strict=True)
    return all(bound.low_seconds / NOISE <= one <= bound.high_seconds * NOISE for bound, one in pairs)


def _wanted(situation: Situation) -> Pair:
    """Best (W1, W2) in seconds, without bounds; either may be 0 or infinite."""
    measured, risk = situation.measured, situation.risk
    cheap = levels.Level(cost_seconds=measured.snapshot_cost, mtbf_seconds=_mtbf(risk.snapshot))
    dear = levels.Level(cost_seconds=measured.checkpoint_cost, mtbf_seconds=_mtbf(risk.storage))
    pattern = levels.first_order(cheap, dear)
    if pattern.count > 1:
        return pattern.work_seconds, pattern.work_seconds * pattern.count
    cost, mtbf = cheap.cost_seconds + dear.cost_seconds, _mtbf(risk.snapshot + risk.storage)
    both = single.young(cost, mtbf) if risk.kept else single.daly(cost, mtbf)
    return both, both


def _bounds(situation: Situation, step: float) -> Limited:
    measured = situation.measured
    cost = measured.snapshot_cost
    dear = bounds.bounds(
        situation.limits, step,
        cost_seconds=cost + measured.checkpoint_cost, durable_seconds=measured.durable * DURABLE_MARGIN,
    )  # fmt: skip
    cheap = bounds.bounds(
        bounds.Limits(most_seconds=dear.high_seconds), step,
        cost_seconds=cost, durable_seconds=_time(measured.copy_seconds),
    )  # fmt: skip
    return cheap, dear


def _steps(wish: Pair, allowed: Limited, step: float) -> tuple[int, int]:
    """(every_steps, persist_every): whole numbers within the bounds as far as whole numbers can be."""
    every = _whole(min(wish), allowed[0], step)
    return every, _whole(wish[1], allowed[1], every * step)


def _whole(wish: float, allowed: bounds.Bounds, unit: float) -> int:
    count = bounds.whole_steps(min(wish, MOST_STEPS * unit), unit)
    least = math.ceil(min(allowed.low_seconds / unit * (1 - 1e-9), MOST_STEPS))
    most = math.floor(min(allowed.high_seconds / unit * (1 + 1e-9), MOST_STEPS))
    return max(1, least, min(most, count))


def _answer(situation: Situation, plan: InForce, steps: tuple[int, int], why: str) -> Tuned:
    every, persist = steps
    measured, risk = situation.measured, situation.risk
    step = _time(measured.step_seconds)
    cheap, dear = every * step, every * persist * step
    saves = measured.snapshot_cost / cheap + measured.checkpoint_cost / dear
    again = risk.snapshot * cheap / 2 + risk.storage * (dear / 2 + measured.durable)
    loss = saves + again + risk.total * _time(measured.recovery_seconds)
    what = "every step" if every == 1 else f"every {every} steps"
    return Tuned(
        every_steps=every, persist_every=persist, changed=(every, persist) != (plan.every_steps, plan.persist_every),
        reason=f"A snapshot {what}, a checkpoint every {duration(dear)}: {why}.",
        expected_loss=min(1.0, loss), expensive=saves > EXPENSIVE_SHARE,
    )  # fmt: skip


def _why(situation: Situation, wish: Pair, allowed: Limited) -> str:
    measured, risk = situation.measured, situation.risk
    text = f"one costs {duration(measured.snapshot_cost + measured.checkpoint_cost)}"
    text += f", a failure is expected every {duration(1 / risk.total)}" if risk.total else ", no failure is expected"
    if risk.kept:
        text += f" and last words keep the state in {risk.kept / risk.total:.0%} of them"
    if wish[1] > allowed[1].high_seconds:
        return text + f"; {duration(allowed[1].high_seconds)} is the longest allowed"
    if wish[1] >= allowed[1].low_seconds:
        return text
    if allowed[1].low_seconds <= situation.limits.least_seconds:
        return text + f"; {duration(allowed[1].low_seconds)} is the shortest allowed"
    return text + f"; more often is not possible, since one takes {duration(measured.durable)} to reach storage"


def duration(seconds: float) -> str:
    """Seconds in words, to two digits."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.95 * size:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(seconds)} s" if seconds >= 0.1 else f"{_two_digits(seconds * 1000)} ms"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _mtbf(per_second: float) -> float:
    return 1 / per_second if per_second > 0 else math.inf


def _time(seconds: float | None) -> float:
    """A measurement, or 0 for what is none."""
    return seconds if seconds is not None and 0 <= seconds <= _MOST_SECONDS else 0.0
