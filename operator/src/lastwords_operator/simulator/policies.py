"""Ways to choose the interval: ours, the formulas of the literature, habits, and two that know more than a job can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lastwords_operator.core import incidents, tuning
from lastwords_operator.core.incidents import Cause, Incident, Kept
from lastwords_operator.core.interval import bounds, single
from lastwords_operator.simulator.failures import Failure
from lastwords_operator.simulator.world import Plan, Policy, World

Make = Callable[[World, Sequence[Failure]], Policy]
"""A policy for a job, given all of its failures; only what is meant to know them looks."""


class Fixed:
    """The same interval for ever."""

    patience = math.inf

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def stepped(self, now: float, seconds: float) -> None:
        """Learns nothing."""

    def struck(self, failure: Failure, kept: Kept) -> None:
        """Learns nothing."""

    def plan(self, now: float, next_failure: float) -> Plan:
        """Always the same."""
        return Plan(snapshot_seconds=self.seconds)


class PlainLoss(Fixed):
    """Where the plain loss is least, with the mean time between failures seen so far; half an hour before the first."""

    def __init__(self, world: World) -> None:
        super().__init__(1800.0)
        self.cost = _cost(world)
        self.exposure = 0.0
        self.count = 0

    def stepped(self, now: float, seconds: float) -> None:
        """Count the time."""
        self.exposure += seconds

    def struck(self, failure: Failure, kept: Kept) -> None:
        """Count the failure."""
        self.count += 1
        if self.exposure > 0:
            self.seconds = single.young(self.cost, self.exposure / self.count)


class LastGap(PlainLoss):
    """The mean time between failures is taken to be the newest gap: quick, and as noisy as can be."""

    def struck(self, failure: Failure, kept: Kept) -> None:
        """Only the newest gap counts."""
        self.count = 0
        super().struck(failure, kept)
        self.exposure = 0.0


class Clairvoyant(Fixed):
    """Knows the next failure and saves once, just in time: the best that any policy could do."""

    def __init__(self, world: World) -> None:
        super().__init__(math.inf)
        self.durable = world.measured.durable
        self.horizon = world.seconds

    def plan(self, now: float, next_failure: float) -> Plan:
        """One save that becomes durable in the moment of the failure; none in the end."""
        if next_failure >= self.horizon:
            return Plan(snapshot_seconds=math.inf)
        left = (next_failure - now) * (1 - 1e-9) - self.durable
        return Plan(snapshot_seconds=left if left > 0 else math.inf)


class Ours:
    """The estimator and the control law of the coordinator, fed with what a job would measure."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rates = incidents.fresh()
        self.in_force = tuning.InForce(every_steps=1, persist_every=50, measured=False)
        self.failed_at: float | None = None
        self.without_progress = 0
        self.lived = 0.0

    @property
    def patience(self) -> float:
        """Often after a failure; less often the longer nothing happens, as estimates then hardly move."""
        return max(2 * bounds.URGENT_REST_SECONDS, self.lived / 4)

    def stepped(self, now: float, seconds: float) -> None:
        """Exposure."""
        self.rates = incidents.stepped(self.rates, now, seconds, self.world.nodes)
        self.lived += seconds

    def struck(self, failure: Failure, kept: Kept) -> None:
        """One incident."""
        kind = "WorkerLost" if failure.hard else "RankKilled"
        incident = Incident(at=failure.at, cause=Cause.NODE, fault_class=kind, kept=kept)
        self.rates = incidents.struck(self.rates, incident, self.world.recovery_seconds)
        self.failed_at = failure.at
        period = self.in_force.every_steps * self.in_force.persist_every * self.world.step_seconds
        if kept is not Kept.STORAGE or self.lived >= period:
            self.without_progress = 0
        elif self.lived > self.world.measured.durable:
            self.without_progress += 1
        self.lived = 0.0

    def plan(self, now: float, next_failure: float) -> Plan:
        """What the control law says."""
        tuned = tuning.tune(
            tuning.Situation(
                now=now,
                measured=self.world.measured,
                risk=incidents.risk(self.rates, self.world.nodes, last_words=self.world.protection.last_words),
                failed_at=self.failed_at,
                restarts_without_progress=self.without_progress,
            ),
            self.in_force,
        )
        if tuned.changed or not self.in_force.measured:
            self.in_force = tuning.InForce(
                every_steps=tuned.every_steps, persist_every=tuned.persist_every, changed_at=now
            )
        step = self.world.step_seconds
        return Plan(snapshot_seconds=tuned.every_steps * step, persist_every=tuned.persist_every)


def known(interval: Callable[[float, float], float]) -> Make:
    """A formula of (save cost, mean time between failures), with the true mean of the whole time: hindsight."""

    def make(world: World, failures: Sequence[Failure]) -> Policy:
        count = sum(1 for failure in failures if any(node < world.nodes for node in failure.nodes))
        return Fixed(interval(_cost(world), world.seconds / count if count else math.inf))

    return make


def fixed(seconds: float) -> Make:
    """A habit."""
    return lambda world, failures: Fixed(seconds)


def _cost(world: World) -> float:
    return world.measured.snapshot_cost + world.measured.checkpoint_cost


NAMED: dict[str, Make] = {
    "ours": lambda world, failures: Ours(world),
    "plain loss": lambda world, failures: PlainLoss(world),
    "last gap": lambda world, failures: LastGap(world),
    "Young": known(single.young),
    "Daly": known(single.daly),
    "exact": known(single.exact),
    "fixed 30 min": fixed(1800.0),
    "fixed 1 h": fixed(3600.0),
    "clairvoyant": lambda world, failures: Clairvoyant(world),
}
"""
Policies by the name they have in tables. Young, Daly and exact know the true mean; clairvoyant knows each failure.
"""
