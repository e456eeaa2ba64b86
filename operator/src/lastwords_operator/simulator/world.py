"""
A job in virtual time: works, saves, is struck, recovers. Goes from failure to failure in closed form, so that years of
thousands of nodes take seconds.

Simplifications, beside those of the failure process: a save takes its cost in one piece at its beginning; a state
that was kept in memory counts as durable once the job has restarted from it; a plan changes with the next checkpoint.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Protocol

from lastwords_operator.core.incidents import Kept
from lastwords_operator.core.tuning import Measured
from lastwords_operator.simulator import layout
from lastwords_operator.simulator.failures import Failure

MOST_CHANGES_KEPT = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protection:
    """What is left after a failure, beside checkpoints."""

    last_words: bool = True
    success: float = 0.97
    """
    Share of last words that succeed where the survivors hold everything: the rest strikes in the middle of an update.
    """
    snapshots: bool = True
    """Snapshots outlive processes."""
    pieces: int = 1
    replicas: int = 2
    """Each piece of the state is held by so many nodes; 1: whatever loses a node loses state."""

    def kept(self, failure: Failure, struck: int) -> Kept:
        """What a failure that takes `struck` nodes of the job leaves."""
        held = 1.0
        if failure.hard:
            lost = min(struck, self.pieces * self.replicas)
            held = layout.covered(self.pieces, self.replicas, lost)
        if self.last_words and failure.luck < held * self.success:
            return Kept.LIVE
        return Kept.SNAPSHOT if self.snapshots and not failure.hard else Kept.STORAGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The job and its costs. `spares` None: a lost node is replaced at once."""

    nodes: int
    seconds: float
    measured: Measured
    protection: Protection = dataclasses.field(default_factory=Protection)
    recovery: tuple[tuple[str, float], ...] = (("detect", 5.0), ("restart", 60.0), ("restore", 35.0))
    """Phases from a failure to the first new step, with their seconds."""
    spares: int | None = None

    @property
    def recovery_seconds(self) -> float:
        """All phases together."""
        return sum(seconds for _, seconds in self.recovery)

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return self.measured.step_seconds or 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """`snapshot_seconds` of work before each snapshot; every `persist_every`-th is a checkpoint."""

    snapshot_seconds: float
    persist_every: int = 1

    @property
    def checkpoint_seconds(self) -> float:
        """Work before each checkpoint."""
        return self.snapshot_seconds * self.persist_every


class Policy(Protocol):
    """Chooses the plan. Told what a job can know, and the next failure, which only a clairvoyant may look at."""

    @property
    def patience(self) -> float:
        """Seconds until it wants to be asked again, if nothing strikes before."""

    def stepped(self, now: float, seconds: float) -> None:
        """The job has run for `seconds` up to `now`."""

    def struck(self, failure: Failure, kept: Kept) -> None:
        """The job was struck."""

    def plan(self, now: float, next_failure: float) -> Plan:
        """The plan from `now` on."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """Where the time of a job went, in seconds that add up to its length; and how the plan changed."""

    work: float = 0.0
    saving: float = 0.0
    redone: float = 0.0
    recovering: dict[str, float] = dataclasses.field(default_factory=dict)
    waiting: float = 0.0
    """For a node to take the place of a lost one."""
    failures: int = 0
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    changes: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(when, seconds of work between two checkpoints)"""

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.work + self.saving + self.redone + sum(self.recovering.values()) + self.waiting

    @property
    def goodput(self) -> float:
        """Share of the time that became lasting work."""
        return self.work / self.seconds if self.seconds else 0.0

    @property
    def avoidable(self) -> float:
        """Share of the time that depends on the intervals: saves, and work done again."""
        return (self.saving + self.redone) / self.seconds if self.seconds else 0.0


def simulate(world: World, failures: Sequence[Failure], policy: Policy) -> Outcome:
    """A job from beginning to end of its time."""
    machines = _Machines(world)
    outcome = Outcome()
    hits = machines.hits(failures)
    now, hit = 0.0, next(hits, None)
    while now < world.seconds:
        end = min(hit.failure.at if hit else math.inf, world.seconds)
        kept = world.protection.kept(hit.failure, hit.nodes) if hit and hit.failure.at < world.seconds else None
        if end > now:
            life = _Life(world, policy, outcome, begun=now)
            life.run(end)
            lost = life.lost(end, kept)
            outcome.work += life.work - lost
            outcome.redone += lost
            outcome.saving += end - now - life.work
        if hit is None or kept is None:
            break
        outcome.failures += 1
        outcome.kept[kept.value] = outcome.kept.get(kept.value, 0) + 1
        policy.struck(hit.failure, kept)
        now = end
        ready = machines.replaced(now)
        hit = next(hits, None)
        until = min(ready, hit.failure.at if hit else math.inf, world.seconds)
        outcome.waiting += until - now
        now = until
        for name, seconds in world.recovery if until == ready else ():
            until = min(now + seconds, hit.failure.at if hit else math.inf, world.seconds)
            outcome.recovering[name] = outcome.recovering.get(name, 0.0) + until - now
            now = until
    return outcome


class _Life:
    """From a restart to the next failure."""

    def __init__(self, world: World, policy: Policy, outcome: Outcome, begun: float) -> None:
        self.world, self.policy, self.outcome = world, policy, outcome
        self.now = begun
        self.work = 0.0
        """Done in this life, to be kept or not."""
        self.checkpoints = [(-math.inf, 0.0)]
        """(when it began, work it holds), the newest few; what the life began with is durable."""
        self.snapshot = (begun, 0.0)
        """(when the newest but one that may be incomplete began, work it holds)"""

    def run(self, end: float) -> None:
        """Work and save until `end`; between checkpoints the policy is asked again when it wants to be."""
        begun = self.now
        told = begun
        while True:
            plan = self._plan(end)
            pattern, _, _ = self._lengths(plan)
            due = told + self.policy.patience
            patterns = max(1, math.ceil((min(due, end) - self.now) / pattern))
            if self.now + patterns * pattern >= end:
                break
            self._whole(plan, patterns)
            self.policy.stepped(self.now, self.now - told)
            told = self.now
        self._rest(plan, end)
        self.policy.stepped(end, end - told)

    def lost(self, end: float, kept: Kept | None) -> float:
        """Seconds of work that the end of this life cost; None: nothing struck."""
        if kept is None:
            return 0.0
        if kept is Kept.LIVE:
            return min(self.work, self.world.step_seconds / 2)
        durable = max(work for began, work in self.checkpoints if began + self.world.measured.durable <= end)
        if kept is Kept.STORAGE:
            return self.work - durable
        return self.work - max(durable, self.snapshot[1])

    def _plan(self, end: float) -> Plan:
        """The policy's plan, with one save in flight at most."""
        plan = self.policy.plan(self.now, end)
        measured = self.world.measured
        costs = measured.snapshot_cost + measured.checkpoint_cost
        least = max(self.world.step_seconds, (measured.durable - costs) / plan.persist_every)
        plan = dataclasses.replace(plan, snapshot_seconds=min(self.world.seconds, max(least, plan.snapshot_seconds)))
        changes = self.outcome.changes
        if not changes or (changes[-1][1] != plan.checkpoint_seconds and len(changes) < MOST_CHANGES_KEPT):
            changes.append((self.now, plan.checkpoint_seconds))
        return plan

    def _lengths(self, plan: Plan) -> tuple[float, float, float]:
        """Seconds of (a whole pattern, a segment with its snapshot, the saves at its end)."""
        measured = self.world.measured
        segment = plan.snapshot_seconds + measured.snapshot_cost
        last = measured.snapshot_cost + measured.checkpoint_cost
        return plan.persist_every * segment + measured.checkpoint_cost, segment, last

    def _whole(self, plan: Plan, patterns: int) -> None:
        pattern, _, last = self._lengths(plan)
        for back in (1, 0):
            if patterns > back:
                done = patterns - back
                self.checkpoints.append((self.now + done * pattern - last, self.work + done * plan.checkpoint_seconds))
        del self.checkpoints[:-3]
        self.now += patterns * pattern
        self.work += patterns * plan.checkpoint_seconds
        self.snapshot = (self.now, self.work)

    def _rest(self, plan: Plan, end: float) -> None:
        """Up to `end`, which comes before the pattern after next is over."""
        pattern, segment, _last = self._lengths(plan)
        whole = math.floor((end - self.now) / pattern)
        if whole:
            self._whole(plan, whole)
        left = end - self.now
        segments = min(plan.persist_every, math.floor(left / segment))
        begun = self.now + plan.persist_every * segment - self.world.measured.snapshot_cost
        if segments == plan.persist_every:
            self.checkpoints.append((begun, self.work + plan.checkpoint_seconds))
        complete = math.floor((left + self.world.measured.snapshot_cost - self.world.measured.copy_seconds) / segment)
        complete = min(plan.persist_every, max(0, complete))
        self.snapshot = (end, self.work + complete * plan.snapshot_seconds)
        self.work += segments * plan.snapshot_seconds
        if segments < plan.persist_every:
            self.work += min(left - segments * segment, plan.snapshot_seconds)
        self.now = end


@dataclasses.dataclass(frozen=True)
class _Hit:
    failure: Failure
    nodes: int


class _Machines:
    """Which nodes the job has, which are spare, which are being repaired."""

    def __init__(self, world: World) -> None:
        self.wanted = world.nodes
        self.unlimited = world.spares is None
        self.job = set(range(world.nodes))
        self.idle = list(range(world.nodes, world.nodes + (world.spares or 0)))
        self.down: list[tuple[float, int]] = []

    def hits(self, failures: Sequence[Failure]) -> _Hits:
        """Failures that strike the job, looked at one after the other as the job goes on."""
        return _Hits(self, failures)

    def strike(self, failure: Failure) -> int:
        """Nodes of the job that a failure takes or stops; spare ones are taken out."""
        self._repair(failure.at)
        struck = [node for node in failure.nodes if node in self.job]
        if failure.hard and not self.unlimited:
            for node in failure.nodes:
                if node in self.job or node in self.idle:
                    self.job.discard(node)
                    if node in self.idle:
                        self.idle.remove(node)
                    heapq.heappush(self.down, (failure.at + failure.down_seconds, node))
        return len(struck)

    def replaced(self, now: float) -> float:
        """When the job has all its nodes again."""
        self._repair(now)
        while len(self.job) < self.wanted:
            if not self.idle:
                now = max(now, self.down[0][0])
                self._repair(now)
            self.job.add(self.idle.pop(0))
        return now

    def _repair(self, now: float) -> None:
        while self.down and self.down[0][0] <= now:
            self.idle.append(heapq.heappop(self.down)[1])


class _Hits:
    def __init__(self, machines: _Machines, failures: Sequence[Failure]) -> None:
        self.machines, self.failures, self.index = machines, failures, 0

    def __iter__(self) -> _Hits:
        return self

    def __next__(self) -> _Hit:
        while self.index < len(self.failures):
            failure = self.failures[self.index]
            self.index += 1
            if struck := self.machines.strike(failure):
                return _Hit(failure, struck)
        raise StopIteration
