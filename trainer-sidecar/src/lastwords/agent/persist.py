"""
One save: this worker's files of a checkpoint, and the commit.

All workers make the same plan from the same facts; the first to create `plan.json` wins, and the plan that stands there
rules. The lowest worker that writes commits; the others take over after a delay that grows with their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from lastwords.agent.offload import Offload
from lastwords.agent.volume import Part, Volume
from lastwords.agent.windows import window
from lastwords.protocol import pieces
from lastwords.protocol import volume as names
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId, CheckpointPlan, IncompleteError, Manifest
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints
from lastwords.storage.streams import CancelledError, Source

T = TypeVar("T")

METADATA_SECONDS = 30.0
TAKE_OVER_SECONDS = 1.0
"""Each worker waits so much longer than the one before it."""
SLOWEST_BYTES_PER_SECOND = 20e6
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25


class SaveError(Exception):
    """The save failed; the text says why. The previous checkpoint stays."""


class NotSavedError(Exception):
    """There is nothing to save any more, and that is no failure: the snapshot was overwritten, or given up."""


class NonFiniteError(NotSavedError):
    """The state holds NaN or infinity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """
    What to save. `parts` and `record_ranks` over the whole job; `workers` whose agents are there to write; `ordered`:
    the coordinator said so; `chosen`: worker 0 chose this one of several.
    """

    id: CheckpointId
    kind: str
    parts: tuple[int, ...]
    record_ranks: tuple[int, ...]
    lineage: tuple[LineageEntry, ...]
    topology: Topology
    workers: tuple[int, ...]
    ordered: bool = False
    chosen: bool = False


class Save:
    """Carries out one SaveOrder. `run` may be cancelled between any two steps."""

    def __init__(
        self,
        order: SaveOrder,
        worker: int,
        *,
        volume: Volume,
        checkpoints: JobCheckpoints,
        offload: Offload,
        fetch_record: Callable[[int], Awaitable[bytes | None]],
        job_uid: str,
        write_seconds: float,
        others_seconds: float,
    ) -> None:
        self.order = order
        self._worker = worker
        self._volume = volume
        self._checkpoints = checkpoints
        self._offload = offload
        self._fetch_record = fetch_record
        self._job_uid = job_uid
        self._write_seconds = write_seconds
        self._others_seconds = others_seconds
        self._given_up = threading.Event()
        self.waiting_since: float | None = None
        """Since when only other workers' parts are missing."""
        self.own_commit = False
        self.missing = ""
        self.pinned: set[tuple[int, int]] = set()

    def give_up(self) -> None:
        """Stop reading the snapshot as soon as possible."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up.is_set()

    async def run(self) -> Manifest:
        """Until the checkpoint is committed. Raises SaveError or NotSavedError."""
        try:
            with window("persist"):
                plan = await self._write()
            with window("commit_gap"):
                return await self._commit(plan)
        except CancelledError as error:
            raise NotSavedError(str(error)) from None
        except (StorageError, CheckpointError, OSError) as error:
            raise SaveError(str(error)) from error

    # -- writing ----------------------------------------------------------------------------------

    async def _write(self) -> CheckpointPlan:
        parts, table = self._parts(), self._volume.table()
        if table is None:
            raise SaveError("there is no layout in the memory volume")
        wrong = [part for part in parts if part.record.generation != table.generation]
        if wrong:
            raise NotSavedError("the snapshot is of an older layout")
        if any(not part.record.finite for part in parts):
            raise NonFiniteError(f"the state at step {self.order.id.step} holds NaN or infinity: it is not saved")
        # Before the storage is asked for anything, since it may be slow and the ranks go on.
        with self._pinned(parts), self._sources(table, parts) as sources:
            plan = await self._publish_plan(table)
            for rank in self._mine(plan):
                await self._write_rank(plan, rank, sources, parts)
        return plan

    def _parts(self) -> list[Part]:
        """This worker's parts of the step. Raises NotSavedError when one that was promised is gone."""
        order = self.order
        wanted = [rank for rank in order.topology.ranks_of(self._worker) if rank in order.parts]
        found = [self._volume.find_part(rank, order.id.step, order.id.attempt) for rank in wanted]
        parts = [part for part in found if part is not None]
        if len(parts) != len(wanted):
            raise NotSavedError(f"the snapshot of step {order.id.step} is not in memory any more")
        return parts

    async def _publish_plan(self, table: PieceTable) -> CheckpointPlan:
        order = self.order
        assignment = pieces.assign_writes(table, order.parts)
        if assignment.missing:
            keys = [table.chunks[i].key for i in assignment.missing[:3]]
            raise SaveError(f"the parts that are left do not hold {keys} ({len(assignment.missing)} tensors)")
        plan = CheckpointPlan(
            step=order.id.step,
            attempt=order.id.attempt,
            kind=order.kind,
            lineage=order.lineage,
            topology=order.topology,
            generation=table.generation,
            chunks=table.chunks,
            writers=assignment.writes,
            record_ranks=tuple(sorted(order.record_ranks)),
        )

        def publish() -> CheckpointPlan:
            self._checkpoints.claim(self._job_uid)
            return self._checkpoints.write_plan(plan)

        return await self._call(publish)

    def _mine(self, plan: CheckpointPlan) -> list[int]:
        """
        Ranks whose files this worker writes: its own, and those of a worker that is gone and whose neighbour this is,
        which has its small records. What it would have written is known to the byte.
        """
        ranks = sorted(set(plan.writers) | set(plan.record_ranks))
        return [rank for rank in ranks if self._writer_of(rank) == self._worker]

    def _writer_of(self, rank: int) -> int | None:
        topology, there = self.order.topology, self.order.workers
        worker = topology.worker_of(rank)
        if worker in there:
            return worker
        neighbour = (worker + 1) % topology.workers
        return neighbour if neighbour in there else min(there, default=None)

    async def _write_rank(
        self, plan: CheckpointPlan, rank: int, sources: dict[int, Source], parts: Sequence[Part]
    ) -> None:
        if await self._call(lambda: self._checkpoints.read_part(plan, rank)) is not None:
            return
        record = None
        if rank in plan.record_ranks:
            ranks = plan.topology.ranks_of(self._worker)
            found = self._volume.find_record(ranks, rank, plan.step, plan.attempt)
            record = found.body if found is not None else await self._fetch_record(rank)
            if record is None:
                raise SaveError(f"the small record of rank {rank} at step {plan.step} is lost")
        absent = [i for i in plan.writers.get(rank, ()) if i not in sources]
        if absent:
            raise SaveError(f"what rank {rank} was to write is not on this worker: {plan.chunks[absent[0]].key}")
        nbytes = sum(plan.chunks[i].nbytes for i in plan.writers.get(rank, ()))
        write = functools.partial(
            self._checkpoints.write_part, plan, rank, sources, record, cancelled=lambda: self._stale(parts)
        )
        await self._offload.run(write, self._write_seconds + nbytes / SLOWEST_BYTES_PER_SECOND)

    def _stale(self, parts: Sequence[Part]) -> bool:
        """Whether what is being read is not the snapshot any more."""
        return self._given_up.is_set() or not all(map(self._volume.unchanged, parts))

    @contextlib.contextmanager
    def _sources(self, table: PieceTable, parts: Sequence[Part]) -> Iterator[dict[int, Source]]:
        """Where the bytes of each chunk are in this worker's parts."""
        contents = pieces.part_chunks(table)
        with contextlib.ExitStack() as files:
            sources: dict[int, Source] = {}
            for part in parts:
                path = self._volume.path(names.part(part.slot, part.record.rank))
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                files.callback(os.close, file)
                _, ranges = pieces.part_layout(table, contents[part.record.rank])
                sources |= {chunk: (file, *where) for chunk, where in ranges.items()}
            yield sources

    @contextlib.contextmanager
    def _pinned(self, parts: Sequence[Part]) -> Iterator[None]:
        """The ranks leave these parts alone while they are read; checked after, since they may have been faster."""
        first = self.order.topology.ranks_of(self._worker)[0]
        procs = self.order.topology.processes_per_worker
        for part in parts:
            self._volume.pin(part.slot, part.record.rank - first, procs, part.record.step + 1)
        self.pinned = {(part.slot, part.record.rank) for part in parts}
        try:
            yield
        finally:
            self.pinned = set()
            for part in parts:
                self._volume.pin(part.slot, part.record.rank - first, procs, 0)

    # -- committing -------------------------------------------------------------------------------

    async def _commit(self, plan: CheckpointPlan) -> Manifest:
        ranks = set(plan.writers) | set(plan.record_ranks)
        writers = sorted({worker for worker in map(self._writer_of, ranks) if worker is not None})
        position = writers.index(self._worker) if self._worker in writers else len(writers)
        self.waiting_since = began = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            done = await self._call(lambda: self._checkpoints.read_manifest(self.order.id))
            if done is not None:
                return done
            if time.monotonic() - began >= position * TAKE_OVER_SECONDS:
                try:
                    made = await self._call(lambda: self._checkpoints.commit(plan))
                    self.own_commit = True
                    return made
                except IncompleteError as error:
                    self.missing = str(error)
            if self._given_up.is_set():
                raise NotSavedError("the save was given up")
            if time.monotonic() - began > self._others_seconds:
                raise SaveError(f"step {plan.step} was not committed: {self.missing or 'the others did not commit it'}")
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    async def _call(self, action: Callable[[], T]) -> T:
        return await self._offload.run(action, METADATA_SECONDS)
