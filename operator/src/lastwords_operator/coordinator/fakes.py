"""In-memory ports, for tests and for trying decisions out."""

from __future__ import annotations

from collections.abc import Mapping

from lastwords.protocol.messages import WorkerOrder
from lastwords_operator.coordinator import ports
from lastwords_operator.coordinator.channel import Heard
from lastwords_operator.core.model import JobStatus
from lastwords_operator.core.observation import AGENT, TRAINER, Event


class MemoryStatusStore:
    """`ports.StatusStore`."""

    def __init__(self) -> None:
        self.status: JobStatus | None = None
        self.version = 0

    async def load(self) -> tuple[JobStatus | None, int]:
        """What was saved last."""
        return self.status, self.version

    async def save(self, status: JobStatus, version: int) -> int:
        """Checks the version."""
        if version != self.version:
            raise ports.ConflictError(f"version is {self.version}, not {version}")
        self.status = status
        self.version += 1
        return self.version


class MemoryWorkers:
    """`ports.Workers` whose processes always start."""

    def __init__(self) -> None:
        self.running: dict[int, ports.Containers] = {}
        self._incarnations = 0

    async def ensure(self, worker: int) -> None:
        """Both containers run at once."""
        if worker not in self.running or not self.running[worker].pids:
            kept = self.running.get(worker)
            self._incarnations += 1
            self.running[worker] = ports.Containers(
                worker=worker,
                incarnation=kept.incarnation if kept is not None else f"incarnation-{self._incarnations}",
                pids={AGENT: 1000 + worker, TRAINER: 2000 + worker},
                starts={AGENT: 1, TRAINER: 1},
            )

    async def replace(self, worker: int, incarnation: str) -> None:
        """Another incarnation takes its place."""
        if worker in self.running and self.running[worker].incarnation == incarnation:
            del self.running[worker]
            await self.ensure(worker)

    async def end(self, worker: int) -> None:
        """They end at once."""
        if worker in self.running:
            row = self.running[worker]
            self.running[worker] = ports.Containers(worker=worker, incarnation=row.incarnation, starts=row.starts)

    def containers(self) -> tuple[ports.Containers, ...]:
        """All of them."""
        return tuple(self.running[worker] for worker in sorted(self.running))


class MemoryLinks:
    """`ports.Links`: tests put in what was heard and look at what was ordered."""

    def __init__(self) -> None:
        self.rows: dict[int, Heard] = {}
        self.orders: dict[int, WorkerOrder] = {}

    def heard(self) -> dict[int, Heard]:
        """What the test put in."""
        return dict(self.rows)

    def push(self, orders: Mapping[int, WorkerOrder]) -> None:
        """Kept for the test."""
        self.orders = dict(orders)


class ManualClock:
    """`ports.Clock` that the test moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        """What the test set."""
        return self.time


class MemoryEvents:
    """`ports.Events` as a list."""

    def __init__(self) -> None:
        self.emitted: list[tuple[float, Event]] = []

    async def emit(self, at: float, event: Event) -> None:
        """Remember it."""
        self.emitted.append((at, event))
