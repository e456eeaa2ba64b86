"""
Snapshots on other workers: the READY parts of this worker's ranks are kept by the workers after it.

A replica is the same part, with its small record, in the slot of the same number in the other worker's volume. It
mirrors the owner's slots: a slot is overwritten there exactly when the owner has overwritten its own, so what the owner
must not overwrite yet is not overwritten there either.
"""

from __future__ import annotations

import asyncio
import logging
import os

from lastwords.agent import fetching
from lastwords.agent.peers import PeerError, Peers
from lastwords.agent.ranks import Rank
from lastwords.agent.volume import Part, Volume
from lastwords.agent.worker import Worker
from lastwords.protocol import codec, wire
from lastwords.protocol import volume as names

log = logging.getLogger("lastwords.agent")


class ReplicaSender:
    """Has parts of own ranks kept elsewhere, and tells the ranks."""

    def __init__(self, worker: Worker, volume: Volume, peers: Peers) -> None:
        self._worker = worker
        self._volume = volume
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()

    def ready(self, rank: Rank, snapshot: wire.SnapshotReady) -> None:
        """A rank has made a part."""
        if self._worker.replicas:
            task = asyncio.create_task(self._send(rank, snapshot, self._worker.attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, rank: Rank, snapshot: wire.SnapshotReady, attempt: int) -> None:
        worker = self._worker
        part = self._volume.part(snapshot.slot, rank.rank)
        errors = []
        if part is None or (part.record.step, part.record.attempt) != (snapshot.step, attempt):
            errors.append("it was overwritten")
        else:
            for distance in range(1, worker.replicas + 1):
                keeper = (worker.number + distance) % worker.topology.workers
                try:
                    await self._peers.replicate(keeper, worker.number, part)
                except PeerError as problem:
                    errors.append(str(problem))
        error = "; ".join(errors)
        if error:
            text = f"the snapshot of step {snapshot.step} has fewer replicas than it should: {error}"
            log.warning("rank %d: %s", rank.rank, text)
            worker.notice("no-replica", text)
        rank.send(wire.Replicated(step=snapshot.step, error=error))


class ReplicaKeeper:
    """Gets parts of other workers' ranks into this worker's volume."""

    def __init__(self, volume: Volume, peers: Peers) -> None:
        self._volume = volume
        self._peers = peers
        self._locks: dict[tuple[int, int], asyncio.Lock] = {}

    async def keep(self, owner: int, part: Part) -> None:
        """The part as `owner` has it, with its small record. Raises PeerError, OSError."""
        record = part.record
        key = (part.slot, record.rank)
        async with self._locks.setdefault(key, asyncio.Lock()):
            here = self._volume.part(*key)
            if here is not None and here.record == record:
                return
            fetching.invalidate(self._volume, *key)
            file = fetching.allocated(self._volume.path(names.part(*key)), record.file_bytes)
            try:
                async for offset, data in self._peers.blocks(owner, part, list(range(len(record.blocks)))):
                    os.pwrite(file, data, offset)
            finally:
                os.close(file)
            small, _ = await self._peers.record(owner, record.rank, record.step, record.attempt)
            fetching.write_area(self._volume, names.part_rank_record(*key), small)
            fetching.write_area(self._volume, names.part_commit(*key), codec.dumps(record), names.COMMIT_AREA_BYTES)
