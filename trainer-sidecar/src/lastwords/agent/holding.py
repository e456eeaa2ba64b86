"""Holds ranks at the gate, has their live state copied, and asks where they are."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from lastwords.agent import starting
from lastwords.agent.ranks import Rank, process_state
from lastwords.agent.volume import Block
from lastwords.agent.worker import Worker
from lastwords.protocol import wire
from lastwords.protocol.control import Word
from lastwords.protocol.messages import LiveCopy, StackReport

log = logging.getLogger("lastwords.agent")

UNRESPONSIVE_SECONDS = 1.5


class Holder:
    """
    Decides whether the ranks of this worker must wait before their next update.

    The worker holds itself when one of its ranks dies, loses its connection or raises: at once, and until an order says
    that this hold is over. `count` is the number of times it has done so.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen: set[tuple[int, int, int]] = set()
        self._in_force = False
        self.by_agent = False
        """Held for a reason of the agent's own: the coordinator is lost."""
        # The last agent died while its hold was in force.
        self.count = int(bool(worker.memory.held_attempt) and worker.memory.held_attempt == worker.attempt)

    @property
    def number(self) -> int:
        """Number of the hold in force; 0 = none."""
        return self._worker.memory.hold_number if self._in_force else 0

    def reconcile(self) -> None:
        """Look for broken ranks, then hold or release everyone."""
        self._notice_broken()
        wanted = self._wanted()
        worker = self._worker
        if wanted and not self._in_force:
            highest = max((r.hold_state.hold for r in worker.ranks.values() if r.hold_state is not None), default=0)
            worker.remember(hold_number=max(worker.memory.hold_number, highest) + 1)
        self._in_force = wanted
        for rank in worker.ranks.values():
            if rank.connection is None:
                continue
            if wanted:
                self._hold(rank)
            elif rank.hold_sent is not None or rank.hold_state is not None:
                told = rank.hold_state.hold if rank.hold_state is not None else 0
                rank.send(wire.Release(hold=max(worker.memory.hold_number, told)))
                rank.hold_sent = rank.hold_state = None

    def _hold(self, rank: Rank) -> None:
        order = self._worker.current
        release_to = order.release_to if order is not None and not self.by_agent else None
        message = wire.Hold(hold=self._worker.memory.hold_number, release_to=release_to)
        if rank.hold_sent != message:
            rank.hold_sent = message
            rank.send(message)

    def _notice_broken(self) -> None:
        worker = self._worker
        if starting.stopping(worker):
            return
        for rank in worker.ranks.values():
            reason = rank.broken()
            key = (rank.attempt, rank.rank, rank.connections)
            if reason and key not in self._seen:
                self._seen.add(key)
                self.count += 1
                worker.remember(held_attempt=worker.attempt)
                log.warning("rank %d: %s; all ranks of this worker are held", rank.rank, reason)

    def _wanted(self) -> bool:
        worker, order = self._worker, self._worker.order
        if self.by_agent:
            return True
        released = order.release_hold if order is not None else 0
        if self.count <= released:
            worker.remember(held_attempt=0)
        ordered = worker.current is not None and worker.current.hold
        return ordered or (self.count > released and worker.memory.held_attempt == worker.attempt > 0)


@dataclasses.dataclass
class _Copy:
    order: LiveCopy
    waiting: set[int]
    errors: list[str]


class LiveCopies:
    """
    Carries out live-copy orders. `free(parts)` is called with the (slot, rank) that will be written, so that whoever
    reads them stops.
    """

    def __init__(self, worker: Worker, free: Callable[[Iterable[tuple[int, int]]], None]) -> None:
        self._worker = worker
        self._free = free
        self._copy: _Copy | None = None
        self.done: tuple[int, ...] = ()
        self.errors: tuple[str, ...] = ()

    def reconcile(self) -> None:
        """Begin a new order; give up on writers that are gone."""
        order = self._worker.current
        wanted = order.live_copy if order is not None else None
        if wanted is None:
            self._copy = None
            return
        if self._copy is None or self._copy.order.number != wanted.number:
            self._begin(wanted)
        copy = self._copy
        assert copy is not None
        for rank in sorted(copy.waiting):
            if self._worker.ranks[rank].connection is None:
                copy.waiting.discard(rank)
                copy.errors.append(f"rank {rank} has no connection")
        self._finish()

    def answered(self, rank: Rank, message: wire.LiveCopyDone) -> None:
        """A writer is done or could not do it."""
        copy = self._copy
        if copy is None or message.number != copy.order.number or rank.rank not in copy.waiting:
            return
        copy.waiting.discard(rank.rank)
        if message.error:
            copy.errors.append(f"rank {rank.rank}: {message.error}")
        self._finish()

    def _begin(self, order: LiveCopy) -> None:
        worker = self._worker
        tasks: dict[int, dict[int, int]] = {}
        errors = []
        for part, writer in sorted(order.writers.items()):
            if part not in worker.own_ranks or worker.volume.find_part(part, order.step, worker.attempt) is not None:
                continue
            if writer in worker.ranks:
                tasks.setdefault(writer, {})[part] = self._choose_slot(part)
            else:
                errors.append(f"rank {writer} is not on this worker")
        self._copy = _Copy(order, set(tasks), errors)
        self.errors = ()
        self._free([(slot, part) for parts in tasks.values() for part, slot in parts.items()])
        for writer, parts in tasks.items():
            worker.ranks[writer].send(wire.CopyLive(number=order.number, step=order.step, parts=parts))

    def _choose_slot(self, rank: int) -> int:
        """A slot that holds nothing that may still be needed: empty, else not the floor, else the oldest."""
        worker = self._worker
        floor = max((block[Word.FLOOR_STEP] - 1 for block in self._blocks()), default=-1)

        def worth(slot: int) -> tuple[bool, bool, int]:
            part = worker.volume.part(slot, rank)
            step = part.record.step if part is not None else -1
            return part is not None, step == floor, step

        return min(range(worker.settings.slots), key=worth)

    def _blocks(self) -> list[Block]:
        found = (self._worker.volume.block(rank) for rank in self._worker.own_ranks)
        return [block for block in found if block is not None and block[Word.ATTEMPT] == self._worker.attempt]

    def _finish(self) -> None:
        copy = self._copy
        if copy is not None and not copy.waiting and copy.order.number not in self.done:
            self.done = (*self.done, copy.order.number)[-20:]
            self.errors = tuple(copy.errors)


class StackCollector:
    """Asks all ranks for their stacks, once per number that is ordered."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._number = 0
        self._asked_at: float | None = None

    def reconcile(self) -> None:
        """Ask, and after a while say of those that are silent that they are."""
        order = self._worker.current
        if order is not None and order.stacks > self._number:
            self._number = order.stacks
            self._asked_at = time.monotonic()
            for rank in self._worker.ranks.values():
                rank.stack = None
                rank.send(wire.DumpStacks(number=order.stacks))
        if self._asked_at is not None and time.monotonic() - self._asked_at >= UNRESPONSIVE_SECONDS:
            self._asked_at = None
            for rank in self._worker.ranks.values():
                if rank.stack is None and rank.alive:
                    rank.stack = StackReport(responsive=False, process_state=self._state_of(rank))

    def answered(self, rank: Rank) -> None:
        """A rank has answered: add what the kernel says of it."""
        if rank.stack is not None and not rank.stack.process_state:
            rank.stack = dataclasses.replace(rank.stack, process_state=self._state_of(rank))

    @staticmethod
    def _state_of(rank: Rank) -> str:
        hello = rank.connection.hello if rank.connection is not None else None
        pid = hello.pid if hello is not None else rank.process.pid if rank.process is not None else 0
        return process_state(pid) if pid else ""
