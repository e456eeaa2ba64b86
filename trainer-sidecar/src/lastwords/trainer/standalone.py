"""
The Checkpointer under plain python or torchrun with a storage folder: saves and restores in its own process.

No agent, no memory volume: every so many steps the loop stands still while the state is written. The checkpoints have
the same form as all others. Rank 0 writes the tensors (all ranks hold the same ones), every rank its small record;
ranks find each other through the folder only, so it must be shared between them.
"""

from __future__ import annotations

import os
import sys
import time

from lastwords.protocol import environment, manifest, pieces, wire
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId, CheckpointPlan, Manifest, StoredFile
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.storage import places, retention, streams
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints
from lastwords.storage.streams import Source
from lastwords.trainer import collect, copying, restoring
from lastwords.trainer.collect import Collector
from lastwords.trainer.hoststate import HostStateError
from lastwords.trainer.parts import Parts, StateError
from lastwords.trainer.reading import RestoreError
from lastwords.trainer.recording import Recorder

NAMESPACE, JOB, UID = "default", "standalone", "standalone"
SAVE_EVERY_STEPS = 100
KEEP = retention.Keep(last=3)
COMMIT_WAIT_SECONDS = 120.0
_LINEAGE_KEPT = 50


class Standalone:
    """Same interface as the protected one."""

    def __init__(self, storage: str, parts: Parts, collector: Collector) -> None:
        self.step = 0
        self.should_stop = False
        self._parts = parts
        self._collector = collector
        self._rank = int(os.environ.get("RANK", "0"))
        self._world = int(os.environ.get("WORLD_SIZE", "1"))
        self._every = int(os.environ.get(environment.SAVE_EVERY_STEPS) or SAVE_EVERY_STEPS)
        place = places.normal(storage)
        if not places.is_folder(place):
            raise ValueError(
                f"{storage}: a script that runs alone saves to a folder; start it by `lastwords run` for this"
            )
        self._checkpoints = JobCheckpoints.at(place, NAMESPACE, JOB)
        self._storage = storage
        self._attempt = 1
        self._lineage: tuple[LineageEntry, ...] = ()
        self._recorder: Recorder | None = None
        self._saved: int | None = None

    # -- restore ----------------------------------------------------------------------------------

    def restore(self) -> int:
        """From the newest good checkpoint; a damaged one is passed over. Raises WrongModelError, StateError."""
        self._checkpoints.claim(UID)
        folders = self._checkpoints.list_folders()
        self._attempt = max((folder.attempt for folder in folders), default=0) + 1
        infos = [info for info in self._checkpoints.list_checkpoints() if info.finite and not info.rejected]
        parent = CheckpointId(step=0, attempt=0)
        for info in sorted(infos, key=lambda info: retention.age(info.id), reverse=True):
            try:
                found = self._checkpoints.read_manifest(info.id)
                if found is None:
                    continue
                restored = restoring.restore(self._order(found), self._parts, self._collector, self._rank)
            except (RestoreError, CheckpointError, StorageError) as error:
                print(f"lastwords: {info.id.folder} cannot be restored: {error}", file=sys.stderr, flush=True)
                continue
            if not restored.exact:
                print(f"lastwords: {restored.note}", file=sys.stderr, flush=True)
            parent = info.id
            self._lineage = found.plan.lineage
            break
        else:
            if infos:
                raise RestoreError(f"none of the {len(infos)} checkpoints in {self._storage} can be restored")
        self.step = parent.step
        self._saved = parent.step if parent.attempt else None
        entry = LineageEntry(self._attempt, parent.step, parent.attempt)
        self._lineage = (*self._lineage, entry)[-_LINEAGE_KEPT:]
        self._recorder = Recorder(self._parts, self._collector, self._rank, self._attempt, None)
        # What cannot be saved is said now, not at the first save.
        self._recorder.build(self.step, 1)
        return self.step

    def _order(self, found: Manifest) -> wire.RestoreOrder:
        files = [self._file(found.id, part.data) for part in found.parts]
        records = {part.rank: part.record for part in found.parts if part.record is not None}
        own = records.get(self._rank)
        return wire.RestoreOrder(
            source=RestoreSource.CHECKPOINT,
            step=found.id.step,
            attempt=found.id.attempt,
            files=tuple(file for file in files if file is not None),
            chunks_path=self._checkpoints.location(found.id, manifest.MANIFEST),
            record=self._file(found.id, own),
            shared_record=self._file(found.id, records[min(records)]) if own is None and records else None,
            other_records=tuple(file for stored in records.values() if (file := self._file(found.id, stored))),
        )

    def _file(self, checkpoint: CheckpointId, stored: StoredFile | None) -> wire.RestoreFile | None:
        if stored is None:
            return None
        path = self._checkpoints.location(checkpoint, stored.name)
        return wire.RestoreFile(path=path, blocks=stored.blocks, nbytes=stored.nbytes)

    # -- steps ------------------------------------------------------------------------------------

    def step_done(self, *, last: bool = False) -> None:
        """Count, and save when it is time."""
        self.step += 1
        if not last and self.step % self._every == 0:
            self.save()

    def finish(self) -> None:
        """The final state."""
        if self._saved != self.step:
            self._save("final")

    def save(self) -> None:
        """Save now; the loop waits. A failed save is said and training goes on: the previous checkpoint stays."""
        self._save("periodic")

    def _save(self, kind: str) -> None:
        assert self._recorder is not None
        try:
            self._write(kind)
            self._saved = self.step
        except (StorageError, CheckpointError, StateError, HostStateError, TimeoutError) as error:
            print(
                f"lastwords: step {self.step} could not be saved, training goes on: {error}",
                file=sys.stderr,
                flush=True,
            )

    def _write(self, kind: str) -> None:
        assert self._recorder is not None
        self._collector.refresh()
        state = self._collector.state
        split = any(collect.state_holder(optimizer) is not optimizer for optimizer in self._parts.optimizers.values())
        if split or any(chunk.sizes != chunk.shape for chunk in state.chunks):
            raise StateError("sharded tensors can be saved only under `lastwords run` or the operator")
        topology = Topology(workers=1, processes_per_worker=self._world)
        table = pieces.build_table(dict.fromkeys(range(self._world), state.chunks), topology, 1)
        ids = tuple(range(len(table.chunks)))
        plan = CheckpointPlan(
            step=self.step, attempt=self._attempt, kind=kind, lineage=self._lineage, topology=topology, generation=1,
            chunks=table.chunks, writers={0: ids}, record_ranks=tuple(range(self._world)),
        )  # fmt: skip
        self._checkpoints.write_plan(plan)
        record = self._recorder.build(self.step, 1)
        sources, finite = self._sources(table) if self._rank == 0 else ({}, True)
        self._checkpoints.write_part(plan, self._rank, sources, record, finite=finite)
        if self._rank == 0:
            self._commit(plan)

    def _sources(self, table: PieceTable) -> tuple[dict[int, Source], bool]:
        live = {item.chunk: item.local for item in self._collector.state.stable}
        sources: dict[int, Source] = {}
        finite = True
        for index, chunk in enumerate(table.chunks):
            view = copying.bytes_of(live[chunk])
            finite = finite and copying.is_finite_chunk(chunk.dtype, view)
            sources[index] = streams.whole(view)
        return sources, finite

    def _commit(self, plan: CheckpointPlan) -> None:
        """Once all ranks have written."""
        deadline = time.monotonic() + COMMIT_WAIT_SECONDS
        while missing := [rank for rank in range(self._world) if self._checkpoints.read_part(plan, rank) is None]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not written their small records")
            time.sleep(0.02)
        self._checkpoints.commit(plan)
        self._checkpoints.retain(KEEP, in_use=())

    # -- the rest of the interface ----------------------------------------------------------------

    def wait(self) -> None:
        """Saves are over when they return."""

    def set_phase(self, name: str, timeout_seconds: float | None) -> None:
        """Nobody watches."""

    def end_phase(self) -> None:
        """Nobody watches."""

    def report(self, loss: float) -> None:
        """Nobody watches."""
