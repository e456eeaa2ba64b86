"""Every row of the worked answers. A row that no test took fails the last test of this file."""

from __future__ import annotations

import math
import re

import pytest

from lastwords_operator.core import numeric, rate, tuning
from lastwords_operator.core.incidents import Risk
from lastwords_operator.core.interval import bounds, levels, single
from lastwords_operator.simulator import layout
from tests.unit.interval import oracles
from tests.unit.interval.oracles import Row

TAKEN: set[str] = set()


def rows(letter: str, ending: str = "") -> pytest.MarkDecorator:
    found = oracles.group(letter, ending)
    TAKEN.update(row.case for row in found)
    return pytest.mark.parametrize("row", found, ids=[row.case for row in found])


def agrees(answer: float, row: Row) -> bool:
    return oracles.rounded_equal(answer, row)


def costs(row: Row) -> single.Costs:
    return single.Costs(
        save_seconds=row.cost, mtbf_seconds=row.mtbf, recovery_seconds=row.recovery,
        durable_seconds=row.number("L", row.cost), kept=row.number("p"),
        last_words_seconds=row.number("clw"), residual_seconds=row.number("s"),
    )  # fmt: skip


def stated(row: Row, pattern: str) -> float:
    """A figure of the column how_checked."""
    found = re.search(pattern, row.checked)
    assert found, row.checked
    return float(found[1])


@rows("A", ".exact")
def test_exact_optimum_and_its_efficiency(row: Row) -> None:
    assert agrees(single.exact(row.cost, row.mtbf), row)
    eta = single.efficiency(single.exact(row.cost, row.mtbf), costs(row))
    assert eta == pytest.approx(stated(row, r"against ([\d.]+)"), abs=6e-6)
    assert agrees(single.exact_with_last_words(costs(row)), row)


@rows("A", ".daly_ho")
def test_daly(row: Row) -> None:
    assert agrees(single.daly(row.cost, row.mtbf), row)


@rows("A", ".young")
def test_young(row: Row) -> None:
    assert agrees(single.young(row.cost, row.mtbf), row)


@rows("A", ".availability")
def test_availability(row: Row) -> None:
    """Of the literature, for comparison: by first order it is the plain loss with the recovery added to the MTBF."""
    assert agrees(math.sqrt(single.young(row.cost, row.mtbf + row.recovery) ** 2 + row.cost**2), row)


@rows("A", ".ettr")
def test_ettr(row: Row) -> None:
    o = row.cost
    assert agrees(math.sqrt(o**2 + single.young(o, row.mtbf - row.recovery) ** 2) - o, row)


@rows("B", ".exact")
def test_time_to_durable_does_not_move_the_optimum(row: Row) -> None:
    best = single.exact_with_last_words(costs(row))
    assert agrees(single.exact(row.cost, row.mtbf), row) and agrees(best, row)
    eta = single.efficiency(best, costs(row))
    assert eta == pytest.approx(stated(row, r"against ([\d.]+)"), abs=6e-6)
    blocking = single.Costs(save_seconds=row.number("L"), mtbf_seconds=row.mtbf, recovery_seconds=row.recovery)
    best_blocking = single.efficiency(single.exact(blocking.save_seconds, row.mtbf), blocking)
    assert best_blocking == pytest.approx(stated(row, r"at best ([\d.]+)"), abs=6e-6)


@rows("B3")
def test_one_save_in_flight_bounds_the_optimum(row: Row) -> None:
    limit = bounds.bounds(bounds.Limits(), 1.0, cost_seconds=row.cost, durable_seconds=row.number("L"))
    assert agrees(limit.clamp(single.exact(row.cost, row.mtbf)), row)
    assert single.efficiency(row.answer, costs(row)) == pytest.approx(stated(row, r"eta ([\d.]+) at"), abs=6e-6)


@rows("B4")
def test_slowdown_is_a_cost(row: Row) -> None:
    cost = single.overlapped(row.cost, float(row.other["alpha"]), row.number("L"))
    assert cost == pytest.approx(7.9)
    assert agrees(single.exact(cost, row.mtbf), row)


@rows("C", ".exact")
def test_exact_optimum_with_last_words(row: Row) -> None:
    best = single.exact_with_last_words(costs(row))
    assert agrees(best, row)
    assert single.efficiency(best, costs(row)) == pytest.approx(stated(row, r"against ([\d.]+)"), abs=6e-6)


@rows("C", ".first_order")
def test_first_order_with_last_words(row: Row) -> None:
    classes = [(1 / row.mtbf, row.number("p"))]
    first = single.with_last_words(row.cost, classes)
    assert agrees(first, row)
    best = single.efficiency(single.exact_with_last_words(costs(row)), costs(row))
    assert 1 / single.efficiency(first, costs(row)) - 1 / best <= 2.1e-4


@rows("C", ".daly_eff")
def test_daly_on_the_losing_rate_is_not_better_than_first_order(row: Row) -> None:
    corrected = single.daly(row.cost, single.losing_mtbf([(1 / row.mtbf, row.number("p"))]))
    assert agrees(corrected, row)
    best = single.exact_with_last_words(costs(row))
    first = single.with_last_words(row.cost, [(1 / row.mtbf, row.number("p"))])
    assert corrected < min(best, first)


def two_levels(row: Row) -> tuple[levels.Level, levels.Level]:
    cheap = levels.Level(cost_seconds=row.cost, mtbf_seconds=row.mtbf, recovery_seconds=row.recovery)
    dear = levels.Level(cost_seconds=row.number("C2"), mtbf_seconds=row.number("M2"), recovery_seconds=row.number("R2"))
    return cheap, dear


@rows("D", ".first_order")
def test_first_order_of_two_levels(row: Row) -> None:
    found = levels.first_order(*two_levels(row))
    assert found.count == int(row.number("n")) and agrees(found.work_seconds, row)
    assert found.work_seconds * found.count == pytest.approx(row.number("W2"), rel=6e-4)
    eta = levels.efficiency(found, *two_levels(row))
    assert eta == pytest.approx(stated(row, r"eta with these ([\d.]+)"), abs=6e-7)


@rows("D", ".exact")
def test_exact_optimum_of_two_levels(row: Row) -> None:
    found = levels.exact(*two_levels(row))
    assert found.count == int(row.number("n")) and agrees(found.work_seconds, row)
    eta = levels.efficiency(found, *two_levels(row))
    assert eta == pytest.approx(stated(row, r"against ([\d.]+)"), abs=6e-6)


def weibull_efficiency(interval: float, row: Row) -> float:
    """Job renewed at each failure: interval * sum over the saves that become durable / (mean up-time + recovery)."""
    shape = row.number("weibull_k")
    scale = row.mtbf / math.gamma(1 + 1 / shape)
    total, number = 0.0, 1
    while (alive := math.exp(-(((number * (interval + row.cost)) / scale) ** shape))) > 1e-12:
        total += alive
        number += 1
    return interval * total / (row.mtbf + row.recovery)


@rows("E")
def test_the_exponential_answer_costs_little_where_failures_are_not_exponential(row: Row) -> None:
    """Why the tuner has no shape: the mean is enough. Worst stated loss 0.041 %."""
    exponential = single.exact(row.cost, row.mtbf)
    optimum = numeric.minimise(lambda interval: -weibull_efficiency(interval, row), row.answer / 3, row.answer * 3)
    assert agrees(optimum, row)
    best = weibull_efficiency(optimum, row)
    loss = 1 - weibull_efficiency(exponential, row) / best
    assert loss == pytest.approx(stated(row, r"loss ([\d.]+)%") / 100, abs=6e-6)


@rows("G")
def test_interval_of_the_posterior_mean(row: Row) -> None:
    """The first run of a `Rate` is the plain pair; the others are there for surprises (test_rate)."""
    belief = rate.fresh(rate.Prior(events=row.number("a0"), hours=row.number("b0_node_h")))
    if "daily_counts" in row.other:
        intervals = []
        for count in row.listed("daily_counts"):
            belief = rate.faded(belief, rate.fading(24, row.number("half_life_h")))
            belief = seen(belief, int(count), row.number("daily_node_h"))
            intervals.append(plain_interval(belief, row))
        assert [round(interval) for interval in intervals] == [4254, 2177, 2118, 2341, 2567]
    else:
        belief = seen(belief, int(row.number("n")), row.number("nodes") * row.number("hours"))
        assert rate.mtbf_seconds(row.number("nodes") * plain_mean(belief)) == pytest.approx(row.mtbf, rel=1e-9)
    assert agrees(plain_interval(belief, row), row)


def seen(belief: rate.Rate, events: int, hours: float) -> rate.Rate:
    belief = rate.exposed(belief, hours)
    for _ in range(events):
        belief = rate.happened(belief)
    return belief


def plain_mean(belief: rate.Rate) -> float:
    return belief.shapes[0] / belief.exposures[0]


def plain_interval(belief: rate.Rate, row: Row) -> float:
    return single.young(row.cost, rate.mtbf_seconds(row.number("nodes") * plain_mean(belief)))


@rows("H")
def test_regret_of_an_estimate_from_few_events(row: Row) -> None:
    """Expected extra loss over the Poisson count, with a prior worth one event that is off by a factor."""
    expected, weight = row.number("expected_events"), row.number("prior_weight")
    over = {"1/3": 1 / 3}.get(row.other["prior_mean_over_truth"]) or row.number("prior_mean_over_truth")
    regret, probability = 0.0, math.exp(-expected)
    belief = rate.exposed(rate.fresh(rate.Prior(events=weight, hours=weight / over)), expected)
    for count in range(400):
        ratio = single.young(1, 1 / plain_mean(belief)) / single.young(1, 1)
        regret += probability * excess(ratio)
        probability *= expected / (count + 1)
        if count > expected and probability < 1e-9:
            break
        belief = rate.happened(belief)
    assert regret == pytest.approx(row.answer, rel=5e-3)


def excess(ratio: float) -> float:
    """Extra plain loss of an interval that is off by `ratio`, as a share of the least."""
    costs = single.Costs(save_seconds=6.3, mtbf_seconds=28440)
    best = single.young(6.3, 28440)
    return single.plain_loss(best * ratio, costs) / single.plain_loss(best, costs) - 1


@rows("I")
def test_flatness(row: Row) -> None:
    ratio = row.number("ratio")
    assert agrees(excess(ratio), row) and agrees(excess(1 / ratio), row)
    exact = single.Costs(save_seconds=6.3, mtbf_seconds=28440, recovery_seconds=300)
    best = single.exact(6.3, 28440)
    recovery_alone = math.exp(300 / 28440)
    least = 1 / single.efficiency(best, exact) - recovery_alone
    loss = [1 / single.efficiency(best * factor, exact) - recovery_alone for factor in (ratio, 1 / ratio)]
    longer, shorter = re.findall(r"([\d.]+)%", row.checked)
    assert [one / least - 1 for one in loss] == pytest.approx([float(longer) / 100, float(shorter) / 100], rel=2e-3)


@rows("J")
def test_share_of_last_words(row: Row) -> None:
    share = rate.Share(successes=row.number("successes"), failures=row.number("failures"))
    assert agrees(single.with_last_words(row.cost, [(1 / row.mtbf, share.mean)]), row)


@rows("K")
def test_whole_steps(row: Row) -> None:
    step = row.number("step_s", 12.3)
    assert bounds.whole_steps(single.exact(row.cost, row.mtbf), step) == row.answer
    here, next_ = (single.efficiency(steps * step, costs(row)) for steps in (48, 49))
    assert here == pytest.approx(0.9688247, abs=6e-8) and next_ == pytest.approx(0.9688233, abs=6e-8)


@rows("L")
def test_fault_classes(row: Row) -> None:
    counts, shares = (268, 21, 35, 56, 32, 7), (0.7, 0.6, 0.8, 0.9, 0.98, 0.5)
    classes = [(count / 419 / row.mtbf, share) for count, share in zip(counts, shares, strict=True)]
    assert agrees(single.with_last_words(row.cost, classes), row)
    kept = single.Costs(save_seconds=row.cost, mtbf_seconds=row.mtbf, recovery_seconds=row.recovery, kept=0.74811)
    assert single.exact_with_last_words(kept) == pytest.approx(228.59, rel=1e-4)


@rows("M")
def test_coverage_by_layout(row: Row) -> None:
    numbers = (int(row.number(key)) for key in ("S", "d", "k"))
    answer = layout.covered(*numbers)
    assert agrees(answer, row)


@rows("N")
def test_mtbf_of_many_nodes(row: Row) -> None:
    per_node_hour = row.number("rate_per_1000_node_days") / 1000 / 24
    assert agrees(rate.mtbf_seconds(row.number("nodes") * per_node_hour), row)


@rows("O")
def test_dead_band(row: Row) -> None:
    """One level, and a rate for which the candidate is best."""
    assert row.number("band") == bounds.DEAD_BAND
    losing = 2 / row.number("candidate_s") ** 2
    situation = tuning.Situation(
        now=1e6,
        measured=tuning.Measured(step_seconds=1.0, stall_seconds=1.0, copy_seconds=1.0, durable_seconds=1.0),
        risk=Risk(kept=losing, snapshot=0.0, storage=losing),
    )
    current = tuning.InForce(every_steps=int(row.number("current_s")), persist_every=1)
    assert tuning.tune(situation, current).every_steps == row.answer


@rows("P")
def test_clamp(row: Row) -> None:
    limit = bounds.Bounds(low_seconds=row.number("lo_s"), high_seconds=row.number("hi_s"))
    assert limit.clamp(row.number("raw_s")) == row.answer


def test_every_row_is_tested() -> None:
    assert {row.case for row in oracles.read()} - TAKEN == set()
    assert len(oracles.read()) == 127
