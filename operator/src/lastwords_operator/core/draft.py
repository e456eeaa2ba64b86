"""The decision in the making: the status as it becomes in this pass, and what is to be announced."""

from __future__ import annotations

import dataclasses
from typing import Any

from lastwords_operator.core.model import Condition, JobState, JobStatus, Recovery
from lastwords_operator.core.observation import Event, Observation

MOST_RECOVERIES = 50


class Draft:
    """Used within one call of `decide` only; everything that goes in and comes out is frozen."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.events: list[Event] = []
        self.wake_times: list[float] = []

    @property
    def obs(self) -> Observation:
        """The observation, with the status as it stands now."""
        return self._observation

    @property
    def status(self) -> JobStatus:
        """The status as it stands now."""
        return self._observation.status

    @property
    def now(self) -> float:
        """Time of the observation."""
        return self._observation.now

    def put(self, status: JobStatus) -> None:
        """Replace the status."""
        if status != self.status:
            self._observation = dataclasses.replace(self._observation, status=status)

    def set(self, **changes: Any) -> None:
        """Change fields of the status."""
        self.put(dataclasses.replace(self.status, **changes))

    def enter(self, state: JobState, message: str, **changes: Any) -> None:
        """Go to another state."""
        self.set(state=state, state_since=self.now, message=message, **changes)

    def say(self, message: str) -> None:
        """Why nothing happens; no event."""
        self.set(message=message)

    def event(
        self, reason: str, message: str, *, warning: bool = False, worker: int | None = None, rank: int | None = None
    ) -> None:
        """Announce something once."""
        self.events.append(Event(reason=reason, message=message, warning=warning, worker=worker, rank=rank))

    def wake(self, at: float | None) -> None:
        """Decide again at this time at the latest."""
        if at is not None and at > self.now:
            self.wake_times.append(at)

    def condition(self, type_: str, status: bool, reason: str, message: str = "") -> bool:
        """Set a condition; returns whether it or its reason is new. `since` only moves when it turns."""
        old = next((item for item in self.status.conditions if item.type == type_), None)
        turned = old is None or old.status != status
        since = self.now if old is None or turned else old.since
        new = Condition(type=type_, status=status, reason=reason, message=message, since=since)
        if old == new:
            return False
        rest = tuple(item for item in self.status.conditions if item.type != type_)
        self.set(conditions=tuple(sorted((*rest, new), key=lambda item: item.type)))
        return turned or (old is not None and old.reason != reason)

    def recovery(self, **changes: Any) -> None:
        """Change the newest row of the recoveries, if there is one that is not over."""
        rows = self.status.recoveries
        if rows and rows[-1].first_step_at is None and not rows[-1].interrupted:
            self.set(recoveries=(*rows[:-1], dataclasses.replace(rows[-1], **changes)))

    def add_recovery(self, row: Recovery) -> None:
        """Add a row; one that has not seen its first new step yet was interrupted by this fault."""
        self.recovery(interrupted=True)
        older = tuple(dataclasses.replace(old, traceback="") for old in self.status.recoveries)
        self.set(recoveries=(*older, row)[-MOST_RECOVERIES:])
