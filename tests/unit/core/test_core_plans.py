"""The snapshot plan: first values, what measurement makes of it, renumbering, the planned stop."""

from __future__ import annotations

import dataclasses

from lastwords.protocol.messages import StorageReport
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords_operator.core import plans
from lastwords_operator.core.model import Interval, IntervalMode
from lastwords_operator.core.observation import Observation
from tests.unit.core import build


def _seen(plan: SnapshotPlan, interval: Interval | None = None, *, persist: float = 0.0, **rank: object) -> Observation:
    job = build.spec(interval=interval or Interval())
    values = {"plan_number": plan.number, "step": 100} | rank
    ranks = [build.rank(n, **values) for n in range(4)]
    storage = StorageReport(loaded=True, persist_seconds_last=persist)
    return build.job_with(job, *ranks, status_=build.status(plan=plan), storage=storage)


FIRST = SnapshotPlan(number=1, every_steps=1, persist_every=50, from_step=1)


def test_a_snapshot_costs_about_a_hundredth_of_the_time() -> None:
    """A copy of 40 ms and steps of 0.5 s: every 8 steps; to storage every minute."""
    assert plans.wanted(_seen(FIRST, copy_seconds_last=0.04)) == (8, 15)
    assert plans.wanted(_seen(FIRST, copy_seconds_last=0.001)) == (1, 120)


def test_storage_is_never_asked_faster_than_it_is() -> None:
    """A save of 100 s: every 150 s."""
    assert plans.wanted(_seen(FIRST, persist=100.0)) == (1, 300)


def test_fixed_intervals() -> None:
    """Seconds become steps; steps stay."""
    seconds = Interval(mode=IntervalMode.FIXED_SECONDS, seconds=30.0)
    assert plans.wanted(_seen(FIRST, seconds)) == (60, 1)
    steps = Interval(mode=IntervalMode.FIXED_STEPS, steps=7)
    assert plans.wanted(_seen(FIRST, steps)) == (7, 1)
    plan = plans.first(steps, 20, SnapshotPlan())
    assert [step for step in range(20, 42) if plan.snapshots(step)] == [27, 34, 41]


def test_a_new_plan_is_numbered_and_begins_ahead_of_everybody() -> None:
    """By more than the time a message takes."""
    plan = plans.adjusted(_seen(FIRST, copy_seconds_last=0.04))
    assert (plan.number, plan.every_steps, plan.from_step) == (2, 8, 103)


def test_small_changes_do_not_renumber() -> None:
    """The dead band."""
    plan = SnapshotPlan(number=3, every_steps=8, persist_every=15, from_step=50)
    assert plans.adjusted(_seen(plan, copy_seconds_last=0.045)) == plan


def test_a_plan_holds_for_a_while() -> None:
    """The defaults for five seconds, any other plan for thirty."""
    for plan, seconds in ((FIRST, 5.0), (SnapshotPlan(number=3, every_steps=2, persist_every=9, from_step=50), 30.0)):
        for age, number in ((seconds - 0.1, plan.number), (seconds, plan.number + 1)):
            seen = _seen(plan, copy_seconds_last=0.04)
            status = dataclasses.replace(seen.status, plan_since=build.NOW - age)
            assert plans.adjusted(build.changed(seen, status=status)).number == number


def test_one_rank_that_was_disturbed_does_not_count() -> None:
    """The median of the copies."""
    job = build.spec()
    ranks = [build.rank(n, plan_number=1, copy_seconds_last=2.0 if n == 1 else 0.04) for n in range(4)]
    assert plans.wanted(build.job_with(job, *ranks, status_=build.status(plan=FIRST))) == (8, 15)


def test_a_plan_that_somebody_missed_is_given_again() -> None:
    """Once everybody is past its first step and somebody is not on it; before that, nothing happens."""
    plan = SnapshotPlan(number=3, every_steps=8, persist_every=15, from_step=90)
    again = plans.adjusted(_seen(plan, plan_number=2))
    assert (again.number, again.every_steps) == (4, 8)
    assert again.from_step > 103
    ahead = SnapshotPlan(number=3, every_steps=8, persist_every=15, from_step=103)
    assert plans.adjusted(_seen(ahead, plan_number=2)) == ahead


def test_a_planned_stop_is_one_step_for_all_O_10() -> None:
    """A margin ahead of the foremost; missed, it is given again."""
    plan = plans.stopping(_seen(FIRST))
    assert (plan.number, plan.stop_after, plan.from_step) == (2, 103, 103)
    late = plans.adjusted(_seen(plan, plan_number=1, step=110))
    assert late.number == 3
    assert late.stop_after is not None
    assert late.stop_after > 112


def test_long_steps_are_stopped_soon() -> None:
    """A step of a minute: after the one after the next."""
    assert plans.stopping(_seen(FIRST, step_seconds=60.0)).stop_after == 102


def test_a_new_attempt_keeps_what_was_measured() -> None:
    """It starts with the settings of the last one, renumbered."""
    known = SnapshotPlan(number=5, every_steps=8, persist_every=15, from_step=50)
    plan = plans.first(Interval(), 60, known)
    assert (plan.number, plan.every_steps, plan.persist_every, plan.from_step) == (6, 8, 15, 68)
