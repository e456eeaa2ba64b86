"""The loop's order of effects, and what it does when the status was changed under it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest

from lastwords.protocol.messages import AgentReport, RunState, WorkerOrder
from lastwords.protocol.pieces import Topology
from lastwords_operator.coordinator import fakes, ports
from lastwords_operator.coordinator.channel import Heard
from lastwords_operator.coordinator.gather import Term, gather
from lastwords_operator.coordinator.loop import Loop
from lastwords_operator.core.model import JobSpec, JobStatus
from lastwords_operator.core.observation import (
    AGENT,
    DEAD,
    RUNNING,
    TRAINER,
    Decision,
    EnsureWorker,
    Event,
    Observation,
    ReplaceWorker,
)

SPEC = JobSpec(name="job", workers=2, processes_per_worker=2)
TERM = Term(spec=SPEC, epoch=3, started_at=999_000.0)


def order(run: RunState = RunState.RUNNING) -> WorkerOrder:
    topology = Topology(workers=2, processes_per_worker=2)
    return WorkerOrder(epoch=3, number=1, attempt=1, run=run, topology=topology)


class DeathError(Exception):
    """Stands for the end of the process."""


class Recorder:
    """All ports in one, which write down what happened in which order; any call can be made the last one."""

    def __init__(self, die_at: int = 10**9) -> None:
        self.done: list[str] = []
        self.store = fakes.MemoryStatusStore()
        self.workers = fakes.MemoryWorkers()
        self.links = fakes.MemoryLinks()
        self.events = fakes.MemoryEvents()
        self.clock = fakes.ManualClock()
        self.die_at = die_at

    def did(self, what: str) -> None:
        if len(self.done) >= self.die_at:
            raise DeathError
        self.done.append(what)

    async def load(self) -> tuple[JobStatus | None, int]:
        return await self.store.load()

    async def save(self, status: JobStatus, version: int) -> int:
        self.did(f"save {status.attempt}")
        return await self.store.save(status, version)

    def heard(self) -> dict[int, Heard]:
        return self.links.heard()

    def push(self, orders: Mapping[int, WorkerOrder]) -> None:
        self.did("push")
        self.links.push(orders)

    async def ensure(self, worker: int) -> None:
        self.did(f"ensure {worker}")
        await self.workers.ensure(worker)

    async def replace(self, worker: int, incarnation: str) -> None:
        self.did(f"replace {worker} {incarnation}")

    async def end(self, worker: int) -> None:
        self.did(f"end {worker}")
        await self.workers.end(worker)

    def containers(self) -> tuple[ports.Containers, ...]:
        return self.workers.containers()

    async def emit(self, at: float, event: Event) -> None:
        self.did(f"emit {event.reason}")
        await self.events.emit(at, event)


def decide_once(seen: Observation) -> Decision:
    """Attempt 1 begins once; the actions follow from the status."""
    events = (Event(reason="Started", message=""),) if seen.status.attempt == 0 else ()
    return Decision(
        status=dataclasses.replace(seen.status, attempt=1),
        orders={0: order(), 1: order(RunState.ENDED)},
        actions=(EnsureWorker(worker=0), ReplaceWorker(worker=1, incarnation="old", reason="lost")),
        events=events,
    )


async def run(recorder: Recorder, passes: int = 1, decide=decide_once) -> list[Observation]:  # type: ignore[no-untyped-def]
    seen: list[Observation] = []

    def passed(observation: Observation, decision: Decision) -> bool:
        seen.append(observation)
        loop.poke()
        return len(seen) < passes

    loop = Loop(
        term=TERM,
        decide=decide,
        store=recorder,
        links=recorder,
        workers=recorder,
        clock=recorder.clock,
        events=recorder,
        passed=passed,
    )
    await asyncio.wait_for(loop.run(), 10)
    return seen


ALL = ["save 1", "push", "end 1", "ensure 0", "replace 1 old", "emit Started"]


async def test_status_then_orders_then_actions_then_events() -> None:
    recorder = Recorder()
    await run(recorder)
    assert recorder.done == ALL


async def test_an_unchanged_status_is_not_written_again_but_orders_and_actions_are_repeated() -> None:
    recorder = Recorder()
    await run(recorder, passes=2)
    assert recorder.done[len(ALL) :] == ["push", "end 1", "ensure 0", "replace 1 old"]


@pytest.mark.parametrize("die_at", range(len(ALL)))
async def test_a_death_between_any_two_effects_loses_no_order_and_no_action(die_at: int) -> None:
    first = Recorder(die_at)
    with pytest.raises(DeathError):
        await run(first)
    second = Recorder()
    second.store = first.store
    await run(second)
    assert {"push", "end 1", "ensure 0", "replace 1 old"} <= set(second.done)
    assert second.store.status == JobStatus(attempt=1)
    assert second.store.version == 1


async def test_a_conflict_throws_the_decision_away_before_anything_else_is_done() -> None:
    recorder = Recorder()
    await recorder.store.save(JobStatus(attempt=5), 0)
    calls = []

    def decide(seen: Observation) -> Decision:
        calls.append(seen.status.attempt)
        if len(calls) == 1:
            recorder.store.status = JobStatus(attempt=8)  # somebody else writes between reading and writing
            recorder.store.version += 1
        return Decision(status=dataclasses.replace(seen.status, attempt=seen.status.attempt + 1), orders={})

    await run(recorder, decide=decide)
    assert calls == [5, 8]
    assert recorder.done == ["save 6", "save 9", "push"]
    assert recorder.store.status == JobStatus(attempt=9)


async def test_a_full_disk_orders_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    save, failures = recorder.store.save, [OSError(28, "No space left on device")] * 2

    async def full(status: JobStatus, version: int) -> int:
        if failures:
            raise failures.pop()
        return await save(status, version)

    monkeypatch.setattr(recorder.store, "save", full)
    monkeypatch.setattr("lastwords_operator.coordinator.loop.LONGEST_WAIT_SECONDS", 0.01)
    await run(recorder)
    assert recorder.done == ["save 1", "save 1", *ALL]


async def test_it_wakes_when_the_decision_said_so() -> None:
    recorder = Recorder()
    times: list[float] = []
    loop_time = asyncio.get_running_loop().time

    def decide(seen: Observation) -> Decision:
        return Decision(status=seen.status, orders={}, wake_at=seen.now + 0.05)

    def passed(observation: Observation, decision: Decision) -> bool:
        times.append(loop_time())
        return len(times) < 3

    loop = Loop(
        term=TERM, decide=decide, store=recorder, links=recorder, workers=recorder, clock=recorder.clock,
        events=recorder, passed=passed,
    )  # fmt: skip
    await asyncio.wait_for(loop.run(), 10)
    assert 0.09 <= times[2] - times[0] < 0.9


def heard(worker: int, incarnation: str, connected: bool = True) -> Heard:
    report = AgentReport(worker=worker, incarnation=incarnation)
    return Heard(
        worker=worker, incarnation=incarnation, agent_run="r", connected=connected, silent_seconds=1.5, report=report
    )


async def test_an_observation_has_every_worker_and_only_reports_of_its_incarnation() -> None:
    links, workers = fakes.MemoryLinks(), fakes.MemoryWorkers()
    await workers.ensure(0)
    await workers.ensure(1)
    links.rows = {0: heard(0, workers.running[0].incarnation), 1: heard(1, "replaced since")}
    seen = gather(TERM, JobStatus(), 1_000_000.0, links, workers, "Ctrl-C")
    assert (seen.epoch, seen.coordinator_started_at, seen.stop_requested) == (3, 999_000.0, "Ctrl-C")
    first, second = seen.workers
    assert first.connected and first.report is not None and first.silent_seconds == 1.5
    assert first.containers == {AGENT: RUNNING, TRAINER: RUNNING}
    assert not second.connected and second.report is None
    await workers.end(0)
    seen = gather(TERM, JobStatus(), 1_000_000.0, links, workers, "")
    assert seen.view(0).containers == {AGENT: DEAD, TRAINER: DEAD}


async def test_a_worker_that_was_never_there_is_in_the_observation_too() -> None:
    seen = gather(TERM, JobStatus(), 1.0, fakes.MemoryLinks(), fakes.MemoryWorkers(), "")
    assert [view.worker for view in seen.workers] == [0, 1]
    assert all(not view.connected and not view.containers for view in seen.workers)
