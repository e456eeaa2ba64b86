"""
The snapshot plan in force, and how all ranks of an attempt change it at the same step without comparing clocks.

Every rank adds itself to a counter in the attempt's store when it takes a new plan. The first rank that reaches the
plan's first step decides, by one compare-and-set: yes if all have it, else no. Everybody follows that.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

from lastwords.protocol import wire
from lastwords.protocol.snapshots import SnapshotPlan

log = logging.getLogger("lastwords")

_YES, _NO = "yes", "no"


class Planner:
    """`offer` is called from the link's thread, the rest from the main thread."""

    def __init__(self, plan: SnapshotPlan, world: int, connect: Callable[[], Any]) -> None:
        self.plan = plan
        self._world = world
        self._connect = connect
        self._store: Any = None
        self._offers: collections.deque[SnapshotPlan] = collections.deque()
        self._taken: list[SnapshotPlan] = []
        self._seen = {plan.number}

    def offer(self, order: wire.NewPlan) -> None:
        """The agent has a new plan; repeats are ignored."""
        if order.plan.number not in self._seen:
            self._seen.add(order.plan.number)
            self._offers.append(order.plan)

    def settle(self, step: int) -> None:
        """At the boundary of `step`: take what was offered, decide what begins now."""
        try:
            while self._offers:
                plan = self._offers.popleft()
                self._connected().add(f"lastwords/plan/{plan.number}/taken", 1)
                self._taken.append(plan)
            for plan in [plan for plan in self._taken if step >= _first_step(plan)]:
                self._taken.remove(plan)
                if self._decide(plan.number) and plan.number > self.plan.number:
                    self.plan = plan
        except Exception as error:
            # Rank 0 is dead, and with it the attempt: the old plan does until the end.
            log.warning("lastwords: a new snapshot plan could not be agreed: %s", error)

    def _decide(self, number: int) -> bool:
        store = self._connected()
        all_there = store.add(f"lastwords/plan/{number}/taken", 0) == self._world
        answer = store.compare_set(f"lastwords/plan/{number}/decision", "", _YES if all_there else _NO)
        return bool(answer.decode() == _YES)

    def _connected(self) -> Any:
        if self._store is None:
            self._store = self._connect()
        return self._store


def _first_step(plan: SnapshotPlan) -> int:
    """A plan to stop may carry the first step of the plan before it; what must be decided in time is the stop."""
    return plan.from_step if plan.stop_after is None else max(plan.from_step, plan.stop_after)
