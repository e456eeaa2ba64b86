"""
The tuner on real failures: loss of time that depends on the interval, beside the best constant interval in hindsight
and beside the plain loss, on three clusters and for four save costs; subsets of nodes; the cost of a retune; a
simulated year.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Sequence

from lastwords_operator.core import incidents, tuning
from lastwords_operator.core.incidents import Cause, Incident, Kept
from lastwords_operator.simulator import compare, failures, policies
from lastwords_operator.simulator.failures import Cluster, Failure
from lastwords_operator.simulator.world import Protection, World, simulate
from tests.bench import report

TRACES = pathlib.Path(__file__).resolve().parents[1] / "data" / "traces"
CLUSTERS = {"lanl-18": 1024, "lanl-20": 512, "lanl-8": 164}
COSTS = (0.5, 6.3, 60.0, 200.0)
SUBSET_DAYS = 60
NOTHING_KEPT = Protection(last_words=False, snapshots=False)


def main(quick: bool) -> None:
    """Rows for build/bench/interval.json."""
    costs = COSTS[1:2] if quick else COSTS
    rows = [row for trace in CLUSTERS for cost in costs for row in replay(trace, cost)]
    draws = 12 if quick else 40
    rows += [subset(trace, nodes, draws) for trace in ("lanl-18", "lanl-20") for nodes in (16, 64, 128)]
    report.publish("interval", [*rows, retune(), year()])


def replay(trace: str, cost: float) -> list[report.Row]:
    """A job on all nodes, any of which stops it; checkpoints alone."""
    found = failures.read_trace(TRACES / f"{trace}.csv")
    nodes = max(CLUSTERS[trace], 1 + max(node for one in found for node in one.nodes))
    job = blocking(nodes, found[-1].at, cost)
    ours = percent(job, found, "ours")
    name = f"{trace}, save {cost:g} s: ours"
    rows = [
        report.at_most(name, ours, "%", compare.BEST, 100 * compare.best_constant(job, found).avoidable, 1.01),
        report.at_most(name, ours, "%", "plain loss", percent(job, found, "plain loss"), 1.0),
    ]
    for other in ("fixed 30 min", "fixed 1 h", "last gap"):
        rows.append(report.information(name, ours, "%", other, percent(job, found, other)))
    return rows


def subset(trace: str, nodes: int, draws: int) -> report.Row:
    """Jobs on random nodes at random times, beside the one constant that is best for all of them together."""
    found = failures.read_trace(TRACES / f"{trace}.csv")
    rng = random.Random(17)
    job = blocking(nodes, SUBSET_DAYS * 86400.0, 6.3)
    parts = []
    for _ in range(draws):
        chosen = {node: n for n, node in enumerate(rng.sample(range(CLUSTERS[trace]), nodes))}
        begin = rng.uniform(0, found[-1].at - job.seconds)
        parts.append(renumbered([one for one in found if 0 <= one.at - begin < job.seconds], chosen, begin))
    constants = [100 * 2 ** (n / 4) for n in range(33)]
    best = min(
        statistics.fmean(100 * simulate(job, part, policies.Fixed(constant)).avoidable for part in parts)
        for constant in constants
    )
    ours = statistics.fmean(percent(job, part, "ours") for part in parts)
    name = f"{nodes} nodes of {trace} for {SUBSET_DAYS} days, {draws} draws: ours"
    return report.at_most(name, ours, "%", "best constant of all draws", best, 1.05)


def retune() -> report.Row:
    """A failure learned and the plan thought over, in milliseconds."""
    rates, plan, times = incidents.fresh(), tuning.InForce(every_steps=1, persist_every=50), []
    measured = tuning.Measured(
        step_seconds=2.0, stall_seconds=0.5, copy_seconds=2.0, durable_seconds=60.0, persist_slowdown=0.05
    )
    for n in range(1, 300):
        begun = time.perf_counter()
        rates = incidents.stepped(rates, n * 20_000.0, 19_000.0, 512)
        rates = incidents.struck(rates, Incident(at=n * 20_000.0, cause=Cause.NODE, kept=Kept.LIVE))
        tuning.tune(tuning.Situation(now=n * 20_000.0, measured=measured, risk=incidents.risk(rates, 512)), plan)
        times.append(1000 * (time.perf_counter() - begun))
    return report.at_most("retune after a failure", report.median(times), "ms", "limit", 1.0, 1.0)


def year() -> report.Row:
    """2048 nodes with last words for a year, in seconds of one processor."""
    job = dataclasses.replace(blocking(2048, 365 * 86400.0, 6.3), protection=Protection())
    begun = time.process_time()
    found = failures.draw(failures.poisson, Cluster(nodes=2048, seconds=job.seconds, per_node_hour=4 / 24000), 1)
    simulate(job, found, policies.Ours(job))
    return report.at_most("a year of 2048 nodes", time.process_time() - begun, "s", "limit", 10.0, 1.0)


def blocking(nodes: int, seconds: float, cost: float) -> World:
    """A job whose saves stop it, and that is running again ten minutes after a failure."""
    measured = tuning.Measured(step_seconds=1.0, stall_seconds=cost, copy_seconds=cost, durable_seconds=cost)
    return World(
        nodes=nodes, seconds=seconds, measured=measured, protection=NOTHING_KEPT, recovery=(("recovery", 600.0),)
    )


def percent(job: World, found: Sequence[Failure], name: str) -> float:
    """Time lost to saves and to work done again."""
    return 100 * simulate(job, found, policies.NAMED[name](job, found)).avoidable


def renumbered(found: Sequence[Failure], chosen: dict[int, int], begin: float) -> list[Failure]:
    """Failures of the chosen nodes, which become 0, 1 …, from the beginning on."""
    pairs = [(one, tuple(chosen[node] for node in one.nodes if node in chosen)) for one in found]
    return [dataclasses.replace(one, at=one.at - begin, nodes=nodes) for one, nodes in pairs if nodes]
