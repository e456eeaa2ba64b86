"""What the loop needs from its surroundings. Each port is small, has a fake in `fakes.py`, and one contract test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from lastwords.protocol.messages import WorkerOrder
from lastwords_operator.coordinator.channel import Heard
from lastwords_operator.core.model import JobStatus
from lastwords_operator.core.observation import Event


class ConflictError(Exception):
    """The status was changed by somebody else since it was read: what was decided from it is worthless."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Containers:
    """
    The containers of one worker, by the names of `core.observation`. `pids` has the running ones, `starts` how
    often each was started (0: it was adopted or is not there yet). A container in neither was never there.
    """

    worker: int
    incarnation: str
    pids: dict[str, int] = dataclasses.field(default_factory=dict)
    starts: dict[str, int] = dataclasses.field(default_factory=dict)


class StatusStore(Protocol):
    """Keeps the job's status."""

    async def load(self) -> tuple[JobStatus | None, int]:
        """The status and its version; (None, 0) before the first save."""

    async def save(self, status: JobStatus, version: int) -> int:
        """Replace the status of this version; the new version. Raises ConflictError when it is not the newest."""


class Workers(Protocol):
    """Keeps workers there."""

    async def ensure(self, worker: int) -> None:
        """From now on the worker's containers are to run; those that end are started again (idempotent)."""

    async def replace(self, worker: int, incarnation: str) -> None:
        """End this incarnation with all it runs and holds, and start another. Another one is left alone."""

    async def end(self, worker: int) -> None:
        """From now on the worker's containers are not started again (idempotent)."""

    def containers(self) -> tuple[Containers, ...]:
        """What there is, one entry for each worker that was ever ensured or found."""


class Links(Protocol):
    """The workers' channel, as the loop uses it."""

    def heard(self) -> dict[int, Heard]:
        """The newest knowledge of every worker."""

    def push(self, orders: Mapping[int, WorkerOrder]) -> None:
        """Make these the wanted orders."""


class Clock(Protocol):
    """Where the loop gets the time from."""

    def now(self) -> float:
        """Unix seconds; never goes back while this process lives."""


class Events(Protocol):
    """Tells people what happened."""

    async def emit(self, at: float, event: Event) -> None:
        """Announce one event."""
