"""What enters the rates and what does not (CASES O-23), merging, exposure, and what last words kept."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from lastwords.protocol import codec
from lastwords_operator.core import incidents
from lastwords_operator.core.incidents import Cause, Incident, Kept, Rates
from lastwords_operator.core.model import Fault, FaultKind

HOUR = 3600.0


def run(rates: Rates, hours: float, nodes: int = 16) -> Rates:
    """The job steps for so long."""
    return incidents.stepped(rates, (rates.at or 0.0) + hours * HOUR, hours * HOUR, nodes)


def strike(rates: Rates, cause: Cause = Cause.NODE, *, after: float = 0.0, **fields: object) -> Rates:
    """Something happens `after` seconds."""
    incident = Incident(at=(rates.at or 0.0) + after, cause=cause)
    return incidents.struck(rates, dataclasses.replace(incident, **fields))  # type: ignore[arg-type]


def counted(rates: Rates) -> tuple[float, float, float]:
    """Plain counts of node, job and preemption; fading makes them a little less than whole."""
    return tuple(round(one.events[0], 1) for one in (rates.node, rates.job, rates.preemption))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("cause", "wanted"),
    [(Cause.NODE, (1, 0, 0)), (Cause.JOB, (0, 1, 0)), (Cause.PREEMPTION, (0, 0, 1)), (Cause.NONE, (0, 0, 0))],
)
def test_each_cause_has_its_own_rate(cause: Cause, wanted: tuple[int, int, int]) -> None:
    assert counted(strike(run(incidents.fresh(), 5), cause)) == wanted


def test_mixed_endings_with_a_known_answer_O_23() -> None:
    """Three failures of nodes, one of the program, and any number of normal ends, drains and preemptions."""
    rates = incidents.fresh()
    for cause in [Cause.NONE, Cause.NODE, Cause.NONE, Cause.PREEMPTION, Cause.NODE, Cause.JOB, Cause.NONE, Cause.NODE]:
        rates = strike(run(rates, 2), cause)
    assert counted(rates) == (3, 1, 1)


def test_ten_suspensions_do_not_move_the_estimate_O_23() -> None:
    still, stopped = run(incidents.fresh(), 10), incidents.fresh()
    for _ in range(10):
        stopped = strike(run(stopped, 1), Cause.NONE)
    assert stopped.node.mean == pytest.approx(still.node.mean, rel=0.01)
    assert stopped.job.mean == pytest.approx(still.job.mean, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (FaultKind.RANK_KILLED, Cause.NODE),
        (FaultKind.WORKER_LOST, Cause.NODE),
        (FaultKind.NETWORK, Cause.NODE),
        (FaultKind.HANG, Cause.NODE),
        (FaultKind.LAUNCHER_LOST, Cause.NODE),
        (FaultKind.USER_EXCEPTION, Cause.JOB),
        (FaultKind.RANK_EXITED, Cause.JOB),
        (FaultKind.RANK_CRASHED, Cause.JOB),
        (FaultKind.WORKER_STOPPING, Cause.NONE),
        (FaultKind.FATAL, Cause.NONE),
        (FaultKind.NON_FINITE, Cause.NONE),
        (FaultKind.START_TIMEOUT, Cause.NONE),
        (FaultKind.RESTORE_FAILED, Cause.NONE),
    ],
)
def test_whose_doing_a_fault_is(kind: FaultKind, cause: Cause) -> None:
    fault = Fault(kind=kind, message="", infrastructure=True, step=3)
    assert incidents.cause_of(fault) is cause
    assert incidents.cause_of(dataclasses.replace(fault, before_first_step=True)) is Cause.NONE


def test_every_kind_of_fault_is_listed_above() -> None:
    (mark,) = [mark for mark in test_whose_doing_a_fault_is.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {kind for kind, _ in mark.args[1]} == set(FaultKind)


def test_followers_of_one_incident_are_merged() -> None:
    """A node takes others with it within minutes; eleven minutes later it is another trouble."""
    rates = strike(run(incidents.fresh(), 5))
    rates = strike(run(rates, 0.05), after=60)
    assert counted(rates) == (1, 0, 0)
    assert counted(strike(run(rates, 0.1), after=60)) == (2, 0, 0)


def test_what_comes_before_a_new_step_belongs_to_the_incident() -> None:
    """Recovery took an hour and was struck twice: nothing new was at stake."""
    rates = strike(run(incidents.fresh(), 5))
    rates = strike(strike(rates, after=1800), Cause.JOB, after=1800)
    assert counted(rates) == (1, 0, 0)


def test_a_job_that_recovers_in_seconds_merges_for_seconds() -> None:
    """Else a job that fails every minute would seem to fail every ten."""
    rates = incidents.fresh()
    for _ in range(10):
        rates = run(rates, 60 / HOUR)
        rates = incidents.struck(rates, Incident(at=rates.at or 0.0, cause=Cause.NODE), recovery_seconds=5)
    assert counted(rates) == (10, 0, 0)


def test_a_bug_that_repeats_at_one_step_counts_once() -> None:
    rates = incidents.fresh()
    for _ in range(5):
        rates = strike(run(rates, 1), Cause.JOB, step=500, error="ValueError: bad sample")
    assert counted(rates) == (0, 1, 0)
    rates = strike(run(rates, 1), Cause.JOB, step=900, error="ValueError: bad sample")
    assert counted(rates) == (0, 2, 0)


def test_exposure_is_time_of_stepping_only() -> None:
    """A day of waiting between two hours of work is no reason to call the nodes reliable."""
    rates = run(incidents.fresh(), 1, nodes=8)
    waited = incidents.stepped(rates, (rates.at or 0) + 24 * HOUR, 0.0, 8)
    assert waited.node.hours[0] == pytest.approx(8, rel=0.03) and waited.job.hours[0] == pytest.approx(1, rel=0.03)
    for nonsense in (-5.0, math.nan, math.inf):
        assert incidents.stepped(rates, rates.at or 0, nonsense, 8) == rates


def test_a_clock_that_jumps_back_forgets_nothing() -> None:
    rates = strike(run(incidents.fresh(), 5))
    back = incidents.stepped(rates, -1e6, HOUR, 16)
    assert back.at == rates.at and back.node.events == rates.node.events


def test_risk_adds_the_rates_and_splits_them_by_what_is_kept() -> None:
    rates = run(incidents.fresh(), 1)
    for _ in range(8):
        rates = strike(run(rates, 5), fault_class="RankKilled", kept=Kept.LIVE)
    for kept in (Kept.STORAGE, Kept.STORAGE, Kept.SNAPSHOT):
        rates = strike(run(rates, 5), fault_class="WorkerLost", kept=kept)
    risk = incidents.risk(rates, 16)
    per_hour = 16 * (rates.node.mean + rates.preemption.mean) + rates.job.mean
    assert risk.total * HOUR == pytest.approx(per_hour)
    # RankKilled: 9/10 of 8; WorkerLost: 1/5 of 3; a class not seen yet: 1/2 of 1.
    assert risk.kept / risk.total == pytest.approx((8 * 0.9 + 3 * 0.2 + 0.5) / 12, rel=0.02)
    off = incidents.risk(rates, 16, last_words=False)
    assert off.kept == 0 and off.total == pytest.approx(risk.total)
    assert off.storage / off.total == pytest.approx(risk.storage / (risk.snapshot + risk.storage))


def test_success_of_last_words_differs_by_class() -> None:
    rates = incidents.fresh()
    for _ in range(20):
        rates = strike(run(rates, 1), fault_class="RankKilled", kept=Kept.LIVE)
        rates = strike(run(rates, 1), fault_class="WorkerLost", kept=Kept.STORAGE)
    assert rates.outcomes["RankKilled"].live.mean > 0.9
    assert rates.outcomes["WorkerLost"].live.mean < 0.1


def test_it_fades_with_the_half_life_and_survives_storage() -> None:
    rates = strike(run(incidents.fresh(), 100), fault_class="Hang", kept=Kept.SNAPSHOT)
    later = incidents.stepped(rates, (rates.at or 0) + incidents.HALF_LIFE_HOURS * HOUR, 0.0, 16)
    assert later.node.events[0] == pytest.approx(rates.node.events[0] / 2)
    assert later.outcomes["Hang"].live.failures == pytest.approx(rates.outcomes["Hang"].live.failures / 2)
    assert codec.loads(Rates, codec.dumps(later)) == later
    assert len(codec.dumps(later)) < 8000


def test_the_true_rate_of_a_job_is_found() -> None:
    """64 nodes that fail every 500 node-hours, recoveries of ten minutes, followers and drains between."""
    rng = random.Random(4)
    rates = incidents.fresh()
    for _ in range(40):
        hours = rng.expovariate(64 / 500)
        rates = run(rates, hours, 64)
        rates = strike(strike(rates, after=0), after=rng.uniform(0, 300))
        rates = strike(run(incidents.stepped(rates, (rates.at or 0) + 600, 0, 64), 0.2, 64), Cause.NONE)
    assert rates.node.mean == pytest.approx(1 / 500, rel=0.5)
