"""Small records of own ranks go to the next worker, so that the loss of this one does not lose them."""

from __future__ import annotations

import asyncio

from lastwords.agent.peers import Peers
from lastwords.agent.ranks import Rank
from lastwords.agent.volume import Record, Volume
from lastwords.agent.worker import Worker
from lastwords.protocol import wire
from lastwords.protocol.messages import RestorePlan


class RecordSender:
    """Sends what its ranks say is there; a failure is nobody's business, the next boundary tries again."""

    def __init__(self, worker: Worker, volume: Volume, peers: Peers) -> None:
        self._worker = worker
        self._volume = volume
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()

    def early(self, rank: Rank, message: wire.RecordWritten) -> None:
        """The early record of the coming boundary; the rank waits to hear that it is kept."""
        self._push(rank, message.step)

    def boundary(self, rank: Rank, message: wire.Boundary) -> None:
        """The final record, unless what the neighbour has as an early one says the same."""
        if not (message.foretold and rank.early_kept == message.step):
            self._push(rank, message.step)
        restored = self._restored()
        if restored is not None and restored.step == message.step:
            # What was restored is the floor now, like a snapshot.
            part = self._volume.find_part(rank.rank, restored.step, restored.attempt)
            if part is not None:
                self._push(rank, message.step, part.slot)

    def snapshot(self, rank: Rank, message: wire.SnapshotReady) -> None:
        """The record of a snapshot, kept as long as its slot is."""
        self._push(rank, message.step, message.slot)

    def _push(self, rank: Rank, step: int, slot: int | None = None) -> None:
        worker = self._worker
        record = self._find(rank.rank, step)
        if worker.topology.workers == 1 or record is None:
            return
        attempt = worker.attempt

        def kept() -> None:
            if record.head.provisional and worker.attempt == attempt and slot is None:
                rank.early_kept = step
                rank.send(wire.RecordKept(step=step))

        neighbour = (worker.number + 1) % worker.topology.workers
        task = asyncio.create_task(self._peers.push_record(neighbour, record, kept, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _find(self, rank: int, step: int) -> Record | None:
        attempts = [self._worker.attempt]
        restored = self._restored()
        if restored is not None and restored.step == step:
            # The record has the number of the attempt that wrote it. The neighbour may be a new worker.
            attempts.append(restored.attempt)
        found = (self._volume.find_record((rank,), rank, step, attempt) for attempt in attempts)
        return next((record for record in found if record is not None), None)

    def _restored(self) -> RestorePlan | None:
        memory = self._worker.memory
        return memory.prepared_plan if memory.prepared_attempt == self._worker.attempt else None
