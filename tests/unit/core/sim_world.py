"""
Workers as simple state machines at the level of reports and orders, for tests of the decisions without processes.

The ranks train in lockstep, as with DDP: nobody passes a boundary unless everybody does. Each worker's memory, the
storage and the messages behave as ARCHITECTURE.md says.
"""

from __future__ import annotations

import dataclasses

from lastwords.protocol import pieces
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import (
    AgentReport,
    CheckpointInfo,
    ExitReport,
    Notice,
    PartHolding,
    Prepared,
    RankReport,
    RankState,
    RecordHolding,
    RestoreSource,
    RunState,
    StackReport,
    StorageReport,
    WorkerOrder,
)
from lastwords.protocol.pieces import PieceSummary, TableSummary, Topology
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords_operator.core import coverage
from lastwords_operator.core.model import JobSpec


def ddp_table(topology: Topology, nbytes: int = 1 << 20) -> TableSummary:
    """Everybody holds everything."""
    everyone = pieces.mask(range(topology.world))
    return TableSummary(generation=1, topology=topology, pieces=(PieceSummary(everyone, nbytes),))


@dataclasses.dataclass
class Rank:
    """One rank process."""

    number: int
    state: RankState = RankState.STARTING
    step: int | None = None
    odd: bool = False
    held: bool = False
    at_gate: bool = False
    phase: str | None = "startup"
    phase_timeout: float | None = None
    moved_at: float = 0.0
    exit: ExitReport | None = None
    stopped: bool = False
    in_collective: bool = True
    restored_at: float | None = None
    first_step_at: float | None = None
    stacks_asked: bool = False

    @property
    def alive(self) -> bool:
        return self.state not in (RankState.EXITED, RankState.ABSENT)


class Worker:
    """Launcher, agent, ranks and memory of one worker."""

    def __init__(self, world: World, index: int, generation: int = 0) -> None:
        self.world, self.index = world, index
        self.incarnation = f"w{index}-{generation}"
        self.agent_starts = 1
        self.agent_alive = True
        self.silent_from = world.now
        self.launcher = True
        self.attempt = 0
        self.ranks: dict[int, Rank] = {}
        self.slots: dict[int, list[tuple[int, int, bool] | None]] = {r: [None, None] for r in self.numbers}
        self.records: dict[tuple[int, int, bool], int] = {}
        self.seen = (0, 0)
        self.order: WorkerOrder | None = None
        self.self_hold = 0
        self.neighbours: dict[tuple[int, int, bool], int] = {}
        self.copied: tuple[int, ...] = ()
        self.prepared: Prepared | None = None
        self.layout_attempt = 0
        self.notices: tuple[Notice, ...] = ()
        self.stop_requested = ""
        self.copy_fails = False
        self.launcher_error = ""

    @property
    def numbers(self) -> range:
        return self.world.topology.ranks_of(self.index)

    def holds(self, step: int, attempt: int) -> set[int]:
        """Local ranks whose parts of this state are ready."""
        return {r for r, slots in self.slots.items() if any(s is not None and s[:2] == (step, attempt) for s in slots)}

    def put_part(self, rank: int, step: int, attempt: int, finite: bool = True, floor: int | None = None) -> None:
        """Make a part ready in a slot that does not hold the floor."""
        slots = self.slots[rank]
        if any(s is not None and s[:2] == (step, attempt) for s in slots):
            return
        free = [i for i, s in enumerate(slots) if s is None or s[0] != floor]
        index = min(free, key=lambda i: (-1, 0) if slots[i] is None else (slots[i][1], slots[i][0]))  # type: ignore[index]
        slots[index] = (step, attempt, finite)

    def die(self, rank: Rank, exit_: ExitReport) -> None:
        """A rank ends; the agent holds the worker at once."""
        rank.state, rank.exit, rank.held, rank.at_gate = RankState.EXITED, exit_, False, False
        self.hold_self()

    def hold_self(self) -> None:
        """As when a rank's connection ends."""
        if self.agent_alive:
            self.self_hold += 1
            self.hold_ranks()

    def hold_ranks(self) -> None:
        for rank in self.ranks.values():
            if rank.state is RankState.RUNNING and not rank.stopped and rank.step is not None:
                rank.held = True

    # --- orders ---

    def take(self, order: WorkerOrder) -> None:
        """An order arrives."""
        if self.agent_alive and (order.epoch, order.number) >= self.seen:
            self.seen = (order.epoch, order.number)
            self.order = order

    def act(self) -> None:
        """Do what the newest order says."""
        order = self.order
        if order is None or not self.agent_alive:
            return
        if order.run is not RunState.RUNNING:
            if self.attempt <= order.attempt:
                self.ranks = {}
        elif order.attempt > self.attempt and self.launcher:
            self.attempt = order.attempt
            self.ranks = {r: Rank(r, moved_at=self.world.now) for r in self.numbers}
            self.prepared = None
        if order.run is RunState.RUNNING and order.attempt == self.attempt:
            self._prepare(order)
            self._restore(order)
            self._hold(order)
            self._copy(order)
        if order.stacks:
            for rank in self.ranks.values():
                rank.stacks_asked = True
        if order.persist is not None:
            self.world.persist(order.persist.step, order.persist.attempt, order.persist.kind)

    def _prepare(self, order: WorkerOrder) -> None:
        plan = order.restore
        if plan is None or self.prepared is not None:
            return
        error = ""
        if plan.source is RestoreSource.MEMORY:
            for rank in self.numbers:
                peer = self.world.workers[plan.parts[rank]]
                table = self.world.table
                needed = coverage.masks(table).parts[rank]
                have = coverage.covered(table, parts=peer.holds(plan.step, plan.attempt))
                if needed & ~have or not peer.agent_alive:
                    error = f"part of rank {rank} is not on worker {peer.index}"
                    continue
                self.put_part(rank, plan.step, plan.attempt)
            for rank in self.numbers:
                if rank in plan.records:
                    self.records.setdefault((rank, plan.step, False), plan.attempt)
        stored = CheckpointId(step=plan.step, attempt=plan.attempt) in self.world.catalog
        if plan.source is RestoreSource.CHECKPOINT and not stored:
            error = "the checkpoint is not there"
        self.prepared = Prepared(attempt=order.attempt, ok=not error, error=error)

    def _restore(self, order: WorkerOrder) -> None:
        if not order.store_address or self.prepared is None or not self.prepared.ok or order.restore is None:
            return
        for rank in self.ranks.values():
            if rank.state is RankState.STARTING and not rank.stopped:
                rank.state, rank.step, rank.phase = RankState.RUNNING, order.restore.step, "first_step"
                rank.moved_at = rank.restored_at = self.world.now
                self.layout_attempt = self.attempt

    def _hold(self, order: WorkerOrder) -> None:
        if order.hold:
            self.hold_ranks()
        elif order.release_hold >= self.self_hold:
            for rank in self.ranks.values():
                rank.held = rank.at_gate = False
        if order.release_to is not None:
            for rank in self.ranks.values():
                if rank.held and rank.at_gate and rank.step is not None and rank.step < order.release_to:
                    self.world.pass_boundary(self, rank)
                    rank.at_gate = False

    def _copy(self, order: WorkerOrder) -> None:
        copy = order.live_copy
        if copy is None or copy.number in self.copied or not copy.writers:
            return
        for part, writer in copy.writers.items():
            rank = self.ranks.get(writer)
            if rank and rank.alive and not rank.stopped and rank.step == copy.step and not self.copy_fails:
                limit = self.world.finite_until
                self.put_part(part, copy.step, self.attempt, limit is None or copy.step < limit, self.world.floor)
        self.copied = (*self.copied, copy.number)

    # --- reports ---

    def report(self) -> AgentReport:
        """What the agent knows."""
        now = self.world.now
        live = [r for r in self.ranks.values() if r.alive]
        address = f"10.0.0.1:{2000 + self.attempt}" if self.index == 0 and live else ""
        storage = StorageReport(
            loaded=True,
            checkpoints=tuple(self.world.catalog.values()),
            failures_in_row=self.world.failures,
            error="No space left on device" if self.world.failures else "",
        )
        return AgentReport(
            worker=self.index, incarnation=self.incarnation, agent_run=f"{self.incarnation}.{self.agent_starts}",
            epoch_seen=self.seen[0], order_seen=self.seen[1], attempt=self.attempt,
            run=RunState.RUNNING if self.ranks else RunState.STOPPED, launcher=self.launcher,
            launcher_error=self.launcher_error,
            fetch_address=f"10.0.1.{self.index}:7000", store_address=address,
            ranks=tuple(self._rank(rank, now) for rank in self.ranks.values()),
            parts=tuple(
                PartHolding(rank=r, slot=i, step=s[0], attempt=s[1], generation=1, finite=s[2])
                for r, slots in self.slots.items() for i, s in enumerate(slots) if s is not None
            ),
            records=self._records(),
            table=self.world.table if self.layout_attempt else None, layout_attempt=self.layout_attempt,
            storage=storage, self_hold=self.self_hold, copied=self.copied,
            copy_errors=("a tensor changed",) if self.copy_fails and self.copied else (),
            prepared=self.prepared, notices=self.notices, stop_requested=self.stop_requested,
        )  # fmt: skip

    def _rank(self, rank: Rank, now: float) -> RankReport:
        stack = None
        if rank.stacks_asked and rank.alive:
            stack = StackReport(
                responsive=not rank.stopped,
                process_state="T" if rank.stopped else "S",
                in_collective=rank.in_collective,
            )
        plan = self.world.plan
        return RankReport(
            rank=rank.number, state=rank.state, pid=100 + rank.number, step=rank.step, odd=rank.odd, held=rank.held,
            at_gate=rank.at_gate, phase=rank.phase, phase_timeout_seconds=rank.phase_timeout,
            quiet_seconds=round(now - rank.moved_at, 3),
            step_seconds=self.world.step_seconds if rank.first_step_at else None,
            exit=rank.exit, stack=stack, plan_number=plan.number if plan else 0, copy_seconds_last=0.001,
            first_step_age_seconds=None if rank.first_step_at is None else now - rank.first_step_at,
            restored_age_seconds=None if rank.restored_at is None else now - rank.restored_at,
        )  # fmt: skip

    def _records(self) -> tuple[RecordHolding, ...]:
        """Records of the areas and those kept in slots, own and of the neighbour before this worker."""
        rows = []
        for neighbour, kept in ((False, self.records), (True, self.neighbours)):
            for (rank, step, provisional), attempt in sorted(kept.items()):
                rows.append(
                    RecordHolding(rank=rank, step=step, attempt=attempt, provisional=provisional, neighbour=neighbour)
                )
        return tuple(rows)


class World:
    """All workers, the storage and the time."""

    def __init__(self, spec: JobSpec, *, steps: int = 100, step_seconds: float = 0.5) -> None:
        self.spec, self.total, self.step_seconds = spec, steps, step_seconds
        self.topology = spec.topology
        self.table = ddp_table(self.topology)
        self.now = 0.0
        self.catalog: dict[CheckpointId, CheckpointInfo] = {}
        self.failures = 0
        self.storage_works = True
        self.finite_until: int | None = None
        self.floor: int | None = None
        self.plan: SnapshotPlan | None = None
        self.plan_attempt = 0
        self.next_step_at = 0.0
        self.workers: list[Worker] = []
        self.workers.extend(Worker(self, index) for index in range(spec.workers))

    def ranks(self) -> list[Rank]:
        """All ranks of the newest attempt."""
        newest = max(worker.attempt for worker in self.workers)
        return [rank for worker in self.workers if worker.attempt == newest for rank in worker.ranks.values()]

    def rank(self, number: int) -> Rank:
        return self.workers[self.topology.worker_of(number)].ranks[number]

    def advance(self, seconds: float) -> None:
        """Time passes; the workers act, and train if they can."""
        self.now = round(self.now + seconds, 6)
        for worker in self.workers:
            worker.act()
        if self.now >= self.next_step_at:
            self.next_step_at = self.now + self.step_seconds
            self.train()

    def train(self) -> None:
        """One step of everybody, if everybody can."""
        ranks = self.ranks()
        self._reach_gates(ranks)
        ready = len(ranks) == self.topology.world and all(
            r.state is RankState.RUNNING and not r.held and not r.stopped and not r.odd and r.in_collective
            for r in ranks
        )
        if not ready or len({r.step for r in ranks}) != 1:
            return
        self._take_plan()
        for worker in self.workers:
            for rank in worker.ranks.values():
                self.pass_boundary(worker, rank)
        self.after_boundary()

    def _reach_gates(self, ranks: list[Rank]) -> None:
        """With all gradients there, a held rank reaches its gate; with one missing it stays in the collective."""
        complete = len(ranks) == self.topology.world and all(r.alive and not r.stopped for r in ranks)
        for rank in ranks:
            if rank.held and rank.state is RankState.RUNNING and (complete or rank.at_gate):
                rank.at_gate = True

    def _take_plan(self) -> None:
        """A new plan counts from its first step on, if everybody has it; the plan of a new attempt counts at once."""
        orders = [worker.order for worker in self.workers]
        plans = {order.plan for order in orders if order is not None and order.plan is not None}
        attempt = max(worker.attempt for worker in self.workers)
        if len(plans) != 1:
            return
        plan = plans.pop()
        coming = 1 + max(rank.step or 0 for rank in self.ranks())
        if attempt != self.plan_attempt or coming == plan.from_step:
            self.plan, self.plan_attempt = plan, attempt

    def pass_boundary(self, worker: Worker, rank: Rank) -> None:
        """One rank's update is over."""
        assert rank.step is not None
        rank.step += 1
        rank.odd, rank.phase, rank.moved_at = False, "training", self.now
        rank.first_step_at = rank.first_step_at or self.now
        worker.records = {
            key: attempt for key, attempt in worker.records.items() if key[0] != rank.number or self._keeps(worker, key)
        }
        worker.records[rank.number, rank.step, False] = worker.attempt
        self.hand_over(worker)

    def hand_over(self, worker: Worker) -> None:
        """Another worker's agent keeps the records too."""
        other = self.workers[(worker.index + 1) % len(self.workers)]
        if other is not worker and worker.agent_alive and other.agent_alive:
            other.neighbours = dict(worker.records)

    def _keeps(self, worker: Worker, key: tuple[int, int, bool]) -> bool:
        rank, step, _ = key
        slots = {s[0] for s in worker.slots[rank] if s is not None}
        now = worker.ranks[rank].step or 0
        return step in slots or step >= now - 1

    def after_boundary(self) -> None:
        """Snapshot, persist, stop and finish, as the plan in force says."""
        steps = {rank.step for rank in self.ranks()}
        step = max(s for s in steps if s is not None)
        plan = self.plan or SnapshotPlan()
        last = step >= self.total or (plan.stop_after is not None and step >= plan.stop_after)
        if plan.snapshots(step) or last:
            finite = self.finite_until is None or step < self.finite_until
            for worker in self.workers:
                for number in worker.numbers:
                    worker.put_part(number, step, worker.attempt, finite, self.floor)
            self.floor = step
            if plan.persists(step) or last:
                kind = "final" if step >= self.total else "periodic"
                self.persist(step, self.workers[0].attempt, kind)
        if last:
            for rank in self.ranks():
                rank.state = RankState.FINISHED

    def persist(self, step: int, attempt: int, kind: str) -> None:
        """A checkpoint, if the storage works and the parts are there."""
        if not any(worker.holds(step, attempt) for worker in self.workers):
            return
        id_ = CheckpointId(step=step, attempt=attempt)
        if not self.storage_works:
            self.failures += 1
            return
        self.failures = 0
        finite = all(
            s[2] for w in self.workers for slots in w.slots.values() for s in slots if s and s[:2] == (step, attempt)
        )
        self.catalog.setdefault(id_, CheckpointInfo(id=id_, kind=kind, finite=finite))

    # --- faults ---

    def kill(self, number: int, window: str = "gate") -> None:
        """SIGKILL of a rank: in forward/backward ("gate"), in its update with the others past it or not."""
        worker = self.workers[self.topology.worker_of(number)]
        rank = worker.ranks[number]
        if rank.step is not None and window in ("update", "behind"):
            worker.records[number, rank.step + 1, True] = worker.attempt
            self.hand_over(worker)
            rank.odd = True
            if window == "behind":
                for other in self.workers:
                    for peer in other.ranks.values():
                        if peer.number != number and peer.alive and not peer.held and peer.step == rank.step:
                            self.pass_boundary(other, peer)
        worker.die(rank, ExitReport(signal=9))

    def echo(self, number: int) -> None:
        """A rank's collective fails because of somebody else."""
        self.raise_in(number, "torch.distributed.DistBackendError", "Connection closed by peer", secondary=True)

    def raise_in(self, number: int, exception: str, message: str, *, secondary: bool = False) -> None:
        """The script of a rank ends with an exception; the process stays."""
        rank = self.rank(number)
        rank.state = RankState.ERRORED
        rank.exit = ExitReport(
            exception=exception,
            message=message,
            step=rank.step,
            secondary=secondary,
            traceback=f"…\n{exception}: {message}",
        )
        self.workers[self.topology.worker_of(number)].hold_self()
