"""A coordinator over the simulated workers: observation, decision, delivery, with checks after every pass."""

from __future__ import annotations

import dataclasses
import random

from lastwords.protocol import codec, lineage
from lastwords.protocol.messages import AgentReport, RestoreSource, WorkerOrder
from lastwords_operator.core import decide
from lastwords_operator.core.model import JobStatus
from lastwords_operator.core.observation import (
    AGENT,
    DEAD,
    RUNNING,
    TRAINER,
    Decision,
    Observation,
    ReplaceWorker,
    WorkerView,
)
from tests.unit.core.sim_world import Worker, World

TICK = 0.1


class Loop:
    """`loss` is the chance that one message is lost; with `randomness` given messages are also repeated and late."""

    def __init__(self, world: World, randomness: random.Random | None = None, loss: float = 0.0) -> None:
        self.world, self.random, self.loss = world, randomness, loss
        self.status = JobStatus()
        self.written: JobStatus | None = None
        self.epoch, self.started = 1, 0.0
        self.stop_requested = ""
        self.heard: dict[int, AgentReport] = {}
        self.last: Decision | None = None
        self.late: list[tuple[int, WorkerOrder]] = []
        self.tick_seconds = TICK
        self.history: list[Decision] = []
        self.agents_back: dict[int, float] = {}
        self.launchers_back: dict[int, float] = {}

    # --- one pass ---

    def tick(self) -> Decision:
        """Time passes, messages go both ways, one decision."""
        self.world.advance(self.tick_seconds)
        self._kubelet()
        self.hear()
        decision = self.decide()
        self.send(decision)
        return decision

    def decide(self) -> Decision:
        """Decide, check what must always hold, and take the status over."""
        seen = self.observe()
        decision = decide.decide(seen)
        self.check(seen, decision)
        self.status = decision.status
        self.last = decision
        if decision.events:
            self.history.append(decision)
        for action in decision.actions:
            if isinstance(action, ReplaceWorker):
                self.replace(action.worker, action.incarnation)
        return decision

    def observe(self) -> Observation:
        """What the coordinator sees; the status goes through its text, as on disk."""
        if self.status is not self.written:
            self.written = self.status = codec.loads(JobStatus, codec.dumps(self.status))
        return Observation(
            now=self.world.now, spec=self.world.spec, status=self.status, stop_requested=self.stop_requested,
            workers=tuple(self._view(worker) for worker in self.world.workers),
            epoch=self.epoch, coordinator_started_at=self.started,
        )  # fmt: skip

    def _view(self, worker: Worker) -> WorkerView:
        report = self.heard.get(worker.index)
        if report is not None and report.incarnation != worker.incarnation:
            report = None
        return WorkerView(
            worker=worker.index, incarnation=worker.incarnation, node=f"node-{worker.index}",
            connected=worker.agent_alive and report is not None,
            silent_seconds=0.0 if worker.agent_alive else round(self.world.now - worker.silent_from, 3),
            report=report,
            containers={
                AGENT: RUNNING if worker.agent_alive else DEAD, TRAINER: RUNNING if worker.launcher else DEAD
            },
        )  # fmt: skip

    def check(self, seen: Observation, decision: Decision) -> None:
        """Deciding again changes nothing; attempts grow; a source lies on the path that the job took."""
        if decision.status == seen.status:
            assert decision.events == ()  # what is announced once must leave a mark
            return
        again = decide.decide(dataclasses.replace(seen, status=decision.status))
        assert again.status == decision.status
        assert again.orders == decision.orders
        assert again.events == ()
        assert again.actions == decision.actions
        old, new = seen.status, decision.status
        assert new.attempt >= old.attempt
        assert new.order_number >= old.order_number
        if new.attempt > old.attempt and new.restore is not None and old.lineage:
            if new.restore.source is not RestoreSource.BEGINNING:
                assert lineage.is_valid_source(old.lineage, new.restore.step, new.restore.attempt)
            else:
                assert old.progress_step == 0 or seen.spec.allow_beginning

    # --- messages ---

    def hear(self) -> None:
        for worker in self.world.workers:
            if worker.agent_alive and not self._lost():
                self.heard[worker.index] = worker.report()

    def send(self, decision: Decision) -> None:
        if self.random is not None:
            waiting, self.late = self.late, []
            for index, order in waiting:
                self.world.workers[index].take(order)
        for index, order in decision.orders.items():
            if self._lost():
                continue
            self.world.workers[index].take(order)
            if self.random is not None and self.random.random() < 0.2:
                self.late.append((index, order))

    def _lost(self) -> bool:
        return self.random is not None and self.random.random() < self.loss

    # --- processes that come back by themselves ---

    def _kubelet(self) -> None:
        for index, at in list(self.agents_back.items()):
            if self.world.now >= at:
                worker = self.world.workers[index]
                worker.agent_alive, worker.seen, worker.order, worker.self_hold = True, (0, 0), None, 0
                worker.copied = ()
                worker.agent_starts += 1
                del self.agents_back[index]
        for index, at in list(self.launchers_back.items()):
            if self.world.now >= at:
                self.world.workers[index].launcher = True
                del self.launchers_back[index]

    def kill_agent(self, index: int, seconds: float) -> None:
        """The agent is away for so long; ranks and memory stay."""
        worker = self.world.workers[index]
        worker.agent_alive, worker.silent_from = False, self.world.now
        self.agents_back[index] = self.world.now + seconds

    def kill_launcher(self, index: int, seconds: float = 0.5) -> None:
        """The launcher dies, and its ranks with it."""
        worker = self.world.workers[index]
        worker.launcher = False
        for rank in list(worker.ranks):
            if worker.ranks[rank].alive:
                self.world.kill(rank)
        self.launchers_back[index] = self.world.now + seconds

    def replace(self, index: int, incarnation: str) -> None:
        """Another worker in place of this one: its memory is gone."""
        if self.world.workers[index].incarnation == incarnation:
            generation = int(incarnation.rpartition("-")[2]) + 1
            self.world.workers[index] = Worker(self.world, index, generation)
            self.agents_back.pop(index, None)
            self.launchers_back.pop(index, None)

    def restart_coordinator(self) -> None:
        """The coordinator dies and comes back with what it had written."""
        self.epoch += 1
        self.started = self.world.now
        self.heard = {}
        self.late = []
