"""The control law: the right plan, reasons, bounds, dead band, rest, and no oscillation. CASES O-24, O-25."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords_operator.core import incidents, tuning
from lastwords_operator.core.incidents import Cause, Incident, Kept, Risk
from lastwords_operator.core.interval import bounds, single
from lastwords_operator.core.tuning import InForce, Measured, Situation, Tuned

HOUR = 3600.0
MEASURED = Measured(
    step_seconds=2.0, stall_seconds=0.5, copy_seconds=1.5, durable_seconds=60, persist_slowdown=0.1,
    recovery_seconds=100,
)  # fmt: skip
RISK = Risk(kept=0.0, snapshot=0.0, storage=1 / 28440)
DEFAULT = InForce(every_steps=1, persist_every=50, measured=False)


def situation(**changes: object) -> Situation:
    return dataclasses.replace(Situation(now=1e6, measured=MEASURED, risk=RISK), **changes)  # type: ignore[arg-type]


def in_force(tuned: Tuned, at: float = 0.0) -> InForce:
    return InForce(every_steps=tuned.every_steps, persist_every=tuned.persist_every, changed_at=at)


def work(tuned: Tuned, step: float = 2.0) -> tuple[float, float]:
    """(seconds between snapshots, seconds between checkpoints)"""
    return tuned.every_steps * step, tuned.every_steps * tuned.persist_every * step


def test_nothing_measured_changes_nothing() -> None:
    for nothing in (None, 0.0, -1.0, math.nan, math.inf):
        tuned = tuning.tune(situation(measured=Measured(step_seconds=nothing)), DEFAULT)
        assert (tuned.every_steps, tuned.persist_every, tuned.changed) == (1, 50, False)
        assert tuned.reason == "No step has been measured yet, so the plan stays as it is."


def test_one_level_is_daly_without_and_first_order_with_last_words() -> None:
    """0.5 s stall and a tenth of 58.5 s: 6.35 s for each checkpoint."""
    tuned = tuning.tune(situation(), DEFAULT)
    assert work(tuned)[1] == pytest.approx(single.daly(6.35, 28440), abs=2)
    assert tuned.persist_every == 1 and tuned.changed
    kept = Risk(kept=0.8 / 28440, snapshot=0.0, storage=0.2 / 28440)
    assert work(tuning.tune(situation(risk=kept), DEFAULT))[1] == pytest.approx(
        math.sqrt(2 * 6.35 * 28440 / 0.2), abs=2
    )


def test_two_levels() -> None:
    """Most failures leave a snapshot: frequent snapshots, rare checkpoints."""
    risk = Risk(kept=0.0, snapshot=0.9 / 28440, storage=0.1 / 28440)
    cheap, dear = work(tuning.tune(situation(risk=risk), DEFAULT))
    assert cheap == pytest.approx(math.sqrt(2 * 0.5 * 28440 / 0.9), rel=0.05)
    assert dear == pytest.approx(math.sqrt(2 * 5.85 * 28440 / 0.1), rel=0.05)


def test_free_snapshots_are_taken_at_every_step() -> None:
    free = dataclasses.replace(MEASURED, stall_seconds=0.0)
    risk = Risk(kept=0.5 / 28440, snapshot=0.4 / 28440, storage=0.1 / 28440)
    tuned = tuning.tune(situation(measured=free, risk=risk), DEFAULT)
    assert tuned.every_steps == 1
    assert work(tuned)[1] == pytest.approx(math.sqrt(2 * 5.85 * 28440 / 0.1), rel=0.05)


def test_the_reason_is_one_sentence_with_its_inputs() -> None:
    risk = Risk(kept=0.8 / 28440, snapshot=0.0, storage=0.2 / 28440)
    assert tuning.tune(situation(risk=risk), DEFAULT).reason == (
        "A snapshot every 672 steps, a checkpoint every 22 min: one costs 6.4 s, a failure is expected every 7.9 h and "
        "last words keep the state in 80% of them."
    )
    never = tuning.tune(situation(risk=Risk(kept=0, snapshot=0, storage=0)), DEFAULT)
    assert never.reason.endswith("no failure is expected; 6 h is the longest allowed.")
    assert work(never)[1] == 6 * HOUR


def test_never_shorter_than_one_save_takes_O_24() -> None:
    """One second would be best; storage takes two minutes. When it becomes fast again the interval falls."""
    sick = Risk(kept=0.0, snapshot=0.0, storage=1 / 60)
    slow = dataclasses.replace(MEASURED, durable_seconds=120, persist_slowdown=0.0, stall_seconds=0.1)
    tuned = tuning.tune(situation(measured=slow, risk=sick), DEFAULT)
    assert work(tuned)[1] >= 120 * tuning.DURABLE_MARGIN - 0.2
    assert "more often is not possible, since one takes 2 min to reach storage" in tuned.reason
    fast = dataclasses.replace(slow, durable_seconds=2)
    assert work(tuning.tune(situation(measured=fast, risk=sick), in_force(tuned)))[1] < 60


def test_a_plan_that_storage_can_no_longer_follow_is_raised_out_of_turn_O_24() -> None:
    now = InForce(every_steps=10, persist_every=1, changed_at=1e6 - 1)
    slow = dataclasses.replace(MEASURED, durable_seconds=200)
    assert work(tuning.tune(situation(measured=slow), now))[1] >= 200


def test_no_progress_shortens_towards_the_least_O_25() -> None:
    """Also right after another change, and whatever the estimate says; chance is not mistaken for it."""
    plan, lengths = InForce(every_steps=100, persist_every=18, changed_at=1e6), []
    for restarts in (5, 6, 7, 8):
        tuned = tuning.tune(situation(restarts_without_progress=restarts), plan)
        plan = in_force(tuned, 1e6)
        lengths.append(work(tuned)[1])
    assert lengths == pytest.approx([900, 225, 75, 75], rel=0.1)
    best = InForce(every_steps=300, persist_every=1)
    told = tuning.tune(situation(restarts_without_progress=3), best)
    assert work(told)[1] == 150 and "3 restarts in a row from one step" in told.reason
    assert not tuning.tune(situation(restarts_without_progress=2), best).changed


@pytest.mark.parametrize(("uptime", "restarts"), [(600.0, 3), (200.0, 5)])
def test_killed_again_and_again_with_an_hour_between_saves_O_25(uptime: float, restarts: int) -> None:
    """
    Each life is `uptime` long; the first plan saves once an hour. Checkpoints alone bring the job forward by the
    third.
    """
    plan, rates, now, saved = InForce(every_steps=1800, persist_every=1), incidents.fresh(), 0.0, 0.0
    without, progress = 0, []
    for _ in range(restarts + 2):
        period = plan.every_steps * plan.persist_every * 2.0
        count = math.floor((uptime - MEASURED.durable) / period)
        saved += count * period
        now += uptime
        rates = incidents.stepped(rates, now, uptime, 2)
        rates = incidents.struck(rates, Incident(at=now, cause=Cause.NODE, kept=Kept.STORAGE), 60)
        without = 0 if count else without + 1
        tuned = tuning.tune(
            Situation(
                now=now, measured=MEASURED, risk=incidents.risk(rates, 2), failed_at=now,
                restarts_without_progress=without,
            ),
            plan,
        )  # fmt: skip
        plan = in_force(tuned, now)
        progress.append(saved)
    assert progress[restarts - 1] > 0 and progress[-1] > progress[restarts - 1]


def test_rest_and_dead_band() -> None:
    best = tuning.tune(situation(), DEFAULT)
    near = InForce(every_steps=round(best.every_steps * 1.2), persist_every=1)
    kept = tuning.tune(situation(), near)
    assert not kept.changed and kept.reason.endswith("what is in force is near enough.")
    far = InForce(every_steps=best.every_steps * 3, persist_every=1, changed_at=1e6 - 600)
    waits = tuning.tune(situation(), far)
    assert not waits.changed and waits.reason.endswith("the last change is too recent for another.")
    assert tuning.tune(situation(failed_at=1e6 - 10), far).every_steps == best.every_steps
    assert tuning.tune(situation(now=1e6 + 2 * HOUR), far).every_steps == best.every_steps
    short = InForce(every_steps=10, persist_every=40)
    assert work(tuning.tune(situation(), short))[0] == 40


def test_a_warning_where_saves_take_a_tenth_of_the_time() -> None:
    blocking = Measured(step_seconds=1.0, stall_seconds=10, copy_seconds=10, durable_seconds=10)
    tuned = tuning.tune(situation(measured=blocking, risk=Risk(kept=0, snapshot=0, storage=1 / 120)), DEFAULT)
    assert tuned.expensive and work(tuned, 1.0)[1] == pytest.approx(43, abs=1)
    assert not tuning.tune(situation(), DEFAULT).expensive


def test_expected_loss_is_the_plain_account() -> None:
    tuned = tuning.tune(situation(), DEFAULT)
    plain = single.Costs(save_seconds=6.35, mtbf_seconds=28440, recovery_seconds=100 + 60)
    assert tuned.expected_loss == pytest.approx(single.plain_loss(work(tuned)[1], plain), rel=1e-3)


ANY = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e300, 5e-324]))
RISKS = st.builds(Risk, kept=st.floats(0, 10), snapshot=st.floats(0, 10), storage=st.floats(0, 10))
MEASUREMENTS = st.builds(
    Measured, step_seconds=ANY, stall_seconds=ANY, copy_seconds=ANY, copy_slowdown=ANY,
    durable_seconds=st.one_of(st.none(), ANY), persist_slowdown=ANY, recovery_seconds=ANY,
)  # fmt: skip
PLANS = st.builds(
    InForce, every_steps=st.integers(1, 100_000), persist_every=st.integers(1, 1000),
    changed_at=st.floats(0, 1e6), measured=st.booleans(),
)  # fmt: skip


@given(MEASUREMENTS, RISKS, PLANS, st.integers(0, 4), st.floats(0, 1e5), st.floats(1, 1e5))
@settings(max_examples=300, deadline=None)
def test_never_absurd_and_never_outside_its_bounds(
    measured: Measured, risk: Risk, plan: InForce, stuck: int, least: float, width: float
) -> None:
    limits = bounds.Limits(least_seconds=least, most_seconds=least + width)
    now = situation(measured=measured, risk=risk, restarts_without_progress=stuck, limits=limits)
    tuned = tuning.tune(now, plan)
    assert 1 <= tuned.every_steps <= tuning.MOST_STEPS and 1 <= tuned.persist_every <= tuning.MOST_STEPS
    assert 0 <= tuned.expected_loss <= 1 and "nan" not in tuned.reason and "inf" not in tuned.reason
    step = measured.step_seconds
    if tuned.changed and step and 1e-3 < step < 1e5 and measured.durable < 1e5:
        dear = work(tuned, step)[1]
        floor = max(least, measured.durable * tuning.DURABLE_MARGIN - measured.snapshot_cost - measured.checkpoint_cost)
        assert dear >= min(floor, tuning.MOST_STEPS * step) * 0.999
        assert (
            dear
            <= max(limits.most_seconds, measured.durable * tuning.DURABLE_MARGIN + step, step)
            + tuned.every_steps * step
        )


@pytest.mark.slow
def test_constant_inputs_lead_to_one_plan() -> None:
    """Random jobs: from any plan, each change makes it better, and then nothing changes any more."""
    rng = random.Random(1)
    for _ in range(300):
        measured = Measured(
            step_seconds=10 ** rng.uniform(-1, 1.5), stall_seconds=10 ** rng.uniform(-3, 1),
            copy_seconds=rng.uniform(0, 20), durable_seconds=10 ** rng.uniform(0, 2.5),
            persist_slowdown=rng.uniform(0, 0.2),
        )  # fmt: skip
        risk = Risk(
            kept=10 ** rng.uniform(-7, -3), snapshot=10 ** rng.uniform(-7, -3), storage=10 ** rng.uniform(-7, -3)
        )
        plan = InForce(every_steps=round(10 ** rng.uniform(0, 3)), persist_every=round(10 ** rng.uniform(0, 2)))
        plans, losses, now = [plan], [], 1e6
        for _ in range(25):
            tuned = tuning.tune(Situation(now=now, measured=measured, risk=risk), plan)
            if tuned.changed:
                plan = in_force(tuned, now)
                plans.append(plan)
                losses.append(tuned.expected_loss)
            now += 24 * HOUR
        assert not tuned.changed and len(plans) < 16
        assert losses[1:] == sorted(losses[1:], reverse=True)


@pytest.mark.slow
def test_random_histories_do_not_shake_the_plan() -> None:
    """
    1000 histories with noisy costs, retuned at each failure: once learned, a change in ten failures, and a small one.
    """
    changes = events = 0
    spread = []
    for seed in range(1000):
        lengths = _history(random.Random(seed), events=13)[6:]
        changes += sum(a != b for a, b in itertools.pairwise(lengths))
        events += len(lengths) - 1
        spread.append(max(lengths) / min(lengths))
    assert changes / events < 0.25
    assert sorted(spread)[500] < 1.5 and sorted(spread)[980] < 3


def test_a_quiet_month_changes_the_plan_a_handful_of_times() -> None:
    """Noise of a fifth in what saves cost, no failure: the interval only ever grows."""
    rng = random.Random(2)
    rates, plan, lengths = incidents.fresh(), DEFAULT, []
    for hour in range(720):
        rates = incidents.stepped(rates, hour * HOUR, HOUR, 64)
        noisy = dataclasses.replace(MEASURED, stall_seconds=0.5 * rng.uniform(0.8, 1.2))
        tuned = tuning.tune(Situation(now=hour * HOUR, measured=noisy, risk=incidents.risk(rates, 64)), plan)
        if tuned.changed:
            plan = in_force(tuned, hour * HOUR)
            lengths.append(work(tuned)[1])
    assert len(lengths) < 12
    assert lengths == sorted(lengths)


def _history(rng: random.Random, events: int) -> list[float]:
    """Seconds between checkpoints after each failure."""
    mtbf = 10 ** rng.uniform(3.5, 5.5)
    rates, plan, now, lengths = incidents.fresh(), DEFAULT, 0.0, []
    for _ in range(events):
        gap = rng.expovariate(1 / mtbf)
        now += gap
        rates = incidents.stepped(rates, now, gap, 64)
        rates = incidents.struck(rates, Incident(at=now, cause=Cause.NODE, kept=Kept.STORAGE), 60)
        measured = dataclasses.replace(MEASURED, persist_slowdown=0.1 * rng.uniform(0.8, 1.2))
        told = Situation(now=now, measured=measured, risk=incidents.risk(rates, 64), failed_at=now)
        tuned = tuning.tune(told, plan)
        if tuned.changed:
            plan = in_force(tuned, now)
        lengths.append(work(tuned)[1])
    return lengths


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0012, "1.2 ms"),
        (0.59, "0.59 s"),
        (90, "90 s"),
        (119, "2 min"),
        (28440, "7.9 h"),
        (86400, "24 h"),
        (1e6, "12 d"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert tuning.duration(seconds) == words


def test_smoothing_ignores_what_is_no_time() -> None:
    mean = tuning.smoothed(None, 4.0)
    assert mean == 4.0
    assert tuning.smoothed(mean, 8.0) == 5.0
    assert [tuning.smoothed(mean, bad) for bad in (math.nan, math.inf, -1.0)] == [4.0] * 3
    assert tuning.smoothed(None, math.nan) is None
