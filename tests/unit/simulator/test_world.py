"""The simulated job: time adds up, losses are what the formulas say, spares, layouts, seeds, and known bests."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lastwords_operator.core.incidents import Kept
from lastwords_operator.core.interval import single
from lastwords_operator.core.tuning import Measured
from lastwords_operator.simulator import compare, failures, policies, world
from lastwords_operator.simulator.failures import Cluster, Failure
from lastwords_operator.simulator.policies import Fixed
from lastwords_operator.simulator.world import Protection, World

DAY = 86400.0
BLOCKING = Measured(step_seconds=1.0, stall_seconds=200.0, copy_seconds=200.0, durable_seconds=200.0)
NOTHING = Protection(last_words=False, snapshots=False)
PLAIN = World(nodes=2048, seconds=1000 * DAY, measured=BLOCKING, protection=NOTHING, recovery=(("all", 600.0),))


def strike(at: float, *nodes: int, hard: bool = True, luck: float = 0.5, down: float = 3600.0) -> Failure:
    return Failure(at=at, nodes=nodes or (0,), hard=hard, down_seconds=down, luck=luck)


def history(job: World, mtbf: float, seed: int = 1, **fields: float) -> list[Failure]:
    cluster = Cluster(nodes=job.nodes, seconds=job.seconds, per_node_hour=3600 / mtbf / job.nodes, **fields)
    return failures.draw(failures.poisson, cluster, seed)


@pytest.mark.parametrize("name", list(policies.NAMED))
def test_time_adds_up_under_every_policy(name: str) -> None:
    job = dataclasses.replace(
        PLAIN, seconds=20 * DAY, spares=2, protection=Protection(),
        measured=Measured(step_seconds=2, stall_seconds=0.5, copy_seconds=3, durable_seconds=40, persist_slowdown=0.1),
    )  # fmt: skip
    found = history(job, 11135)
    outcome = world.simulate(job, found, policies.NAMED[name](job, found))
    parts = (outcome.work, outcome.saving, outcome.redone, outcome.waiting, *outcome.recovering.values())
    assert all(part >= 0 for part in parts)
    assert outcome.seconds == pytest.approx(job.seconds, rel=1e-9)
    assert sum(outcome.kept.values()) == outcome.failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        (BLOCKING, 0.0),
        (Measured(step_seconds=1, stall_seconds=5, copy_seconds=5, durable_seconds=300), 0.0),
        (BLOCKING, 0.8),
    ],
    ids=["blocking", "overlapped", "last-words"],
)
def test_goodput_is_that_of_the_exact_model(measured: Measured, kept: float) -> None:
    """
    Twelve histories of 1000 days, three intervals; within the interval of confidence, widened to three in a thousand.
    """
    protection = Protection(last_words=kept > 0, success=kept, snapshots=False)
    job = dataclasses.replace(PLAIN, seconds=150 * DAY, measured=measured, protection=protection)
    histories = [history(job, 11135, seed) for seed in range(8)]
    costs = single.Costs(
        save_seconds=measured.snapshot_cost, mtbf_seconds=11135, recovery_seconds=600,
        durable_seconds=measured.durable, kept=kept, residual_seconds=0.5,
    )  # fmt: skip
    for interval in (900.0, 5000.0):
        seen = [world.simulate(job, found, Fixed(interval)).goodput for found in histories]
        mean = compare.estimate(seen)
        assert single.efficiency(interval, costs) == pytest.approx(mean.mean, abs=1.4 * mean.half_width)


def test_one_failure_by_hand() -> None:
    """Saves at 1000-1200, 2200-2400; struck at 3000: 600 s of work since the save are done again."""
    job = dataclasses.replace(PLAIN, nodes=4, seconds=5000)
    outcome = world.simulate(job, [strike(3000)], Fixed(1000))
    assert (outcome.work, outcome.redone, outcome.saving) == (2000 + 1000 + 200, 600, 400 + 200)
    assert outcome.recovering == {"all": 600}


def test_a_save_that_is_not_durable_yet_is_no_help() -> None:
    measured = Measured(step_seconds=1, stall_seconds=0, copy_seconds=0, durable_seconds=700)
    job = dataclasses.replace(PLAIN, nodes=4, seconds=3000, measured=measured)
    assert world.simulate(job, [strike(2600)], Fixed(1000)).redone == 1600
    assert world.simulate(job, [strike(2700)], Fixed(1000)).redone == 700


@pytest.mark.parametrize(
    ("failure", "protection", "lost"),
    [
        (strike(2900), Protection(), 0.5),
        (strike(2900, luck=0.99), Protection(), 900),
        (strike(2900, luck=0.99, hard=False), Protection(), 900),
        (strike(2900, hard=False), Protection(replicas=1), 0.5),
        (strike(2900), Protection(replicas=1), 900),
        (strike(2900), NOTHING, 900),
    ],
    ids=["live", "torn", "torn-process", "process", "only-copy", "nothing"],
)
def test_what_is_lost_by_what_is_left(failure: Failure, protection: Protection, lost: float) -> None:
    measured = Measured(step_seconds=1, stall_seconds=0, copy_seconds=0, durable_seconds=10)
    job = dataclasses.replace(PLAIN, nodes=4, seconds=6000, measured=measured, protection=protection)
    assert world.simulate(job, [failure], Fixed(1000)).redone == lost


def test_a_snapshot_saves_what_a_checkpoint_has_not() -> None:
    class Levels(Fixed):
        def plan(self, now: float, next_failure: float) -> world.Plan:
            return world.Plan(snapshot_seconds=100, persist_every=10)

    measured = Measured(step_seconds=1, stall_seconds=0, copy_seconds=30, durable_seconds=60)
    job = dataclasses.replace(PLAIN, nodes=4, seconds=6000, measured=measured, protection=Protection(last_words=False))
    assert world.simulate(job, [strike(2950, hard=False)], Levels(0)).redone == 50
    assert world.simulate(job, [strike(2920, hard=False)], Levels(0)).redone == 120
    assert world.simulate(job, [strike(2950)], Levels(0)).redone == 950


def test_a_failure_during_recovery_begins_it_again_and_loses_nothing_more() -> None:
    job = dataclasses.replace(PLAIN, nodes=4, seconds=6000)
    outcome = world.simulate(job, [strike(3000), strike(3400), strike(3500)], Fixed(1000))
    assert (outcome.redone, outcome.recovering["all"], outcome.failures) == (600, 400 + 100 + 600, 3)


def test_spares_take_over_and_a_job_without_waits_for_repair() -> None:
    lost = [strike(1000, 0, down=2000)]
    with_spare = world.simulate(dataclasses.replace(PLAIN, nodes=4, seconds=9000, spares=1), lost, Fixed(500))
    without = world.simulate(dataclasses.replace(PLAIN, nodes=4, seconds=9000, spares=0), lost, Fixed(500))
    assert (with_spare.waiting, without.waiting) == (0, 2000)
    spare_fails_first = [strike(900, 4, down=4000), *lost]
    job = dataclasses.replace(PLAIN, nodes=4, seconds=9000, spares=1)
    assert world.simulate(job, spare_fails_first, Fixed(500)).waiting == 2000


def test_layout_decides_how_often_last_words_help() -> None:
    """Two nodes at once: 16 nodes in 8 groups of 2 lose a piece once in 15."""
    many = [strike(1000.0 * n, 0, 1, luck=(n % 100) / 100) for n in range(1, 1001)]
    job = dataclasses.replace(PLAIN, nodes=16, protection=Protection(success=1.0, pieces=8, replicas=2))
    kept = world.simulate(job, many, Fixed(100)).kept
    assert kept[Kept.LIVE.value] / 1000 == pytest.approx(14 / 15, abs=0.011)


def test_one_save_in_flight_whatever_a_policy_wants() -> None:
    measured = Measured(step_seconds=1, stall_seconds=1, copy_seconds=1, durable_seconds=300)
    job = dataclasses.replace(PLAIN, nodes=4, seconds=10 * DAY, measured=measured)
    outcome = world.simulate(job, [], Fixed(5))
    assert outcome.saving == pytest.approx(job.seconds / 300, rel=0.01)


@pytest.mark.slow
def test_nobody_beats_the_clairvoyant_and_ours_is_near_the_best_constant() -> None:
    job = dataclasses.replace(PLAIN, seconds=60 * DAY)
    names = ["ours", "last gap", "fixed 1 h", "plain loss", compare.BEST, "clairvoyant"]
    lines, _ = compare.run(job, [history(job, 11135, seed) for seed in range(2)], names)
    goodput = {line.policy: line.goodput.mean for line in lines}
    assert max(goodput, key=goodput.__getitem__) == "clairvoyant"
    assert 1 - goodput["ours"] < 1.03 * (1 - goodput[compare.BEST])
    assert goodput["ours"] > max(goodput["last gap"], goodput["fixed 1 h"])


def test_an_extreme_world_ends() -> None:
    """A failure a minute, saves that take five: nothing is ever saved, and that is said."""
    job = dataclasses.replace(PLAIN, nodes=4, seconds=DAY, recovery=(("all", 10.0),))
    outcome = world.simulate(job, history(job, 60.0), policies.Ours(job))
    assert outcome.seconds == pytest.approx(DAY)
    assert outcome.goodput < 0.05
    assert world.simulate(dataclasses.replace(job, seconds=0.0), [], Fixed(1)).goodput == 0
    assert world.simulate(job, [], Fixed(math.inf)).goodput == 1
