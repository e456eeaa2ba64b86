"""
Checkpoints of one job in a store: write, commit, list, verify, delete. Layout: `lastwords.protocol.manifest`.

Nothing counts before `manifest.json` is there; it is created last and at once. Whether a file is there is asked by its
exact name, so a listing that lags behind can delay a clean-up but not hide or invent a checkpoint.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from lastwords.protocol import codec, manifest, pieces, tensorfile
from lastwords.protocol.manifest import (
    CheckpointId,
    CheckpointPlan,
    Claim,
    IncompleteError,
    Manifest,
    PartRecord,
    StoredChunk,
    StoredFile,
)
from lastwords.protocol.messages import CheckpointInfo
from lastwords.protocol.snapshots import BLOCK_BYTES, CHECKSUM_ALGORITHM
from lastwords.storage import base, places, retention, streams
from lastwords.storage.base import StorageError, Store
from lastwords.storage.streams import Source

T = TypeVar("T")

REJECTED = "rejected.json"
_HEADER_GUESS_BYTES = 64 * 1024
"""Most headers are shorter, and one request is cheaper than two."""


class ClaimedError(StorageError):
    """The folder belongs to another job."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or incomplete; the text says which file and how."""


class JobCheckpoints:
    """
    The checkpoints of the job `name` in `namespace`. All methods block, may raise StorageError, and may be called
    from any thread. A stale handle leads to one clean new try.
    """

    def __init__(self, store: Store, namespace: str, name: str) -> None:
        self.store = store
        self.namespace = namespace
        self.name = name
        self._folder = f"{namespace}/{name}"
        self._whole: set[tuple[CheckpointId, StoredFile]] = set()
        """Objects that were seen in full length. They are replaced at once or removed, never cut short: to ask for each
        of them again in every look at the inventory would be thousands of requests."""

    @classmethod
    def at(cls, storage: str, namespace: str, name: str) -> JobCheckpoints:
        """At a place as `places.normal` gives it. Raises StorageError."""
        return cls(places.open_store(storage), namespace, name)

    def path(self, checkpoint: CheckpointId, file: str) -> str:
        """Path of a file in the store."""
        return f"{self._folder}/{checkpoint.folder}/{file}"

    def owns(self, path: str) -> bool:
        """Whether a path in the store is one of this job's files."""
        return path.startswith(f"{self._folder}/")

    def location(self, checkpoint: CheckpointId, file: str) -> str:
        """Where a file of a checkpoint is, for people."""
        return self.store.location(self.path(checkpoint, file))

    def local_path(self, checkpoint: CheckpointId, file: str) -> str | None:
        """Where the ranks can open a file of a checkpoint themselves; None in an object store."""
        return self.store.local_path(self.path(checkpoint, file))

    # -- writing ----------------------------------------------------------------------------------

    def claim(self, uid: str) -> None:
        """Make the folder this job's. Raises ClaimedError when it is another one's."""
        path = f"{self._folder}/{manifest.CLAIM}"
        mine = Claim(uid=uid, name=self.name)
        if _again(lambda: self.store.create(path, _seal(codec.dumps(mine)))):
            return
        if not self.check_owner(uid):
            raise ClaimedError(
                f"{self.store.location(path)} cannot be read: remove it if no other job uses this folder"
            )

    def check_owner(self, uid: str) -> bool:
        """Whether the folder is this job's; False: nobody's. Raises ClaimedError when it is another one's."""
        owner = self._read(Claim, f"{self._folder}/{manifest.CLAIM}")
        if owner is None:
            return False
        if owner.uid != uid:
            raise ClaimedError(
                f"{self.store.location(self._folder)} belongs to another job of the same name (uid {owner.uid}, "
                f"this one is {uid}): give the job another name or another storage folder"
            )
        return True

    def write_plan(self, plan: CheckpointPlan) -> CheckpointPlan:
        """
        Publish who writes what; returns the plan in force, which may be an earlier one with other writers.

        Raises CheckpointError when the one that is there is of another state.
        """
        path = self.path(_id(plan), manifest.PLAN)
        if _again(lambda: self.store.create(path, _seal(codec.dumps(plan)))):
            return plan
        there = self._read(CheckpointPlan, path)
        if there is None:
            raise CheckpointError(f"{path}: torn plan of a writer that died")
        if (there.topology, there.chunks) != (plan.topology, plan.chunks):
            raise CheckpointError(f"{path}: a plan for another state is there")
        return there

    def write_part(
        self,
        plan: CheckpointPlan,
        rank: int,
        sources: Mapping[int, Source],
        record: bytes | None,
        *,
        finite: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> PartRecord:
        """
        Write what `rank` has to: its chunks in one pass with checksums, its small record, then its part record.

        `sources`: for each chunk id where its bytes are. Raises streams.CancelledError.
        """
        checkpoint = _id(plan)
        ids = plan.writers.get(rank, ())
        data: StoredFile | None = None
        stored: tuple[StoredChunk, ...] = ()
        if ids:
            header, ranges = part_layout(plan, ids)
            content = [
                streams.whole(header),
                *streams.coalesce(sources[i] for i in sorted(ids, key=lambda i: ranges[i])),
            ]
            data = self._write_summed(checkpoint, manifest.part_data(rank), content, cancelled)
            stored = tuple(StoredChunk(i, *ranges[i]) for i in sorted(ids))
        small = None
        if record is not None and rank in plan.record_ranks:
            small = self._write_summed(checkpoint, manifest.rank_record(rank), [streams.whole(record)], cancelled)
        if cancelled():
            raise streams.CancelledError("the save was given up")
        part = PartRecord(
            rank=rank, step=plan.step, attempt=plan.attempt, data=data, chunks=stored, record=small, finite=finite
        )
        body = _seal(codec.dumps(part))
        _again(lambda: self.store.write(self.path(checkpoint, manifest.part_record(rank)), [body], len(body)))
        return part

    def read_part(self, plan: CheckpointPlan, rank: int) -> PartRecord | None:
        """The part record of a writer when that is finished: the files it names are there in full length."""
        part = self._read(PartRecord, self.path(_id(plan), manifest.part_record(rank)))
        if part is None or (part.rank, part.step, part.attempt) != (rank, plan.step, plan.attempt):
            return None
        if tuple(sorted(c.chunk_id for c in part.chunks)) != tuple(sorted(plan.writers.get(rank, ()))):
            return None
        return None if any(self._wrong_size(_id(plan), file) for file in _files(part)) else part

    def commit(self, plan: CheckpointPlan) -> Manifest:
        """
        Publish the checkpoint. Whoever loses a race finds the same bytes and agrees.

        Raises IncompleteError naming the ranks whose parts are missing, or what does not fit.
        """
        ranks = sorted(set(plan.writers) | set(plan.record_ranks))
        parts = {rank: self.read_part(plan, rank) for rank in ranks}
        missing = [rank for rank, part in parts.items() if part is None]
        if missing:
            raise IncompleteError(f"the parts of ranks {missing} are not written")
        made = manifest.build_manifest(plan, [part for part in parts.values() if part is not None])
        data = manifest.encode_manifest(made)
        if not _again(lambda: self.store.create(self.path(made.id, manifest.MANIFEST), data)):
            there = self.read_manifest(made.id)
            if there != made:
                raise CheckpointError(f"{made.id.folder}: another manifest is there")
        return made

    # -- reading ----------------------------------------------------------------------------------

    def read_plan(self, checkpoint: CheckpointId) -> CheckpointPlan | None:
        """The plan, or None when there is no whole one."""
        return self._read(CheckpointPlan, self.path(checkpoint, manifest.PLAN))

    def read_manifest(self, checkpoint: CheckpointId) -> Manifest | None:
        """The manifest; None: not committed. Raises CheckpointError when it is damaged."""
        data = _again(lambda: base.read(self.store, self.path(checkpoint, manifest.MANIFEST)))
        if data is None:
            return None
        try:
            found = manifest.decode_manifest(data)
            manifest.build_manifest(found.plan, found.parts)
        except (codec.DecodeError, IncompleteError) as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
        if found.id != checkpoint:
            raise CheckpointError(f"{checkpoint.folder}: the manifest is of {found.id.folder}")
        return found

    def list_folders(self) -> list[CheckpointId]:
        """Every save that was begun, oldest first."""
        names = _again(lambda: self.store.list(self._folder))
        return sorted(filter(None, map(manifest.parse_folder, names)), key=retention.age)

    def list_checkpoints(self, known: Collection[CheckpointId] = ()) -> list[CheckpointInfo]:
        """
        Committed checkpoints, oldest first. Those that cannot be used are in it with the reason.

        `known` are looked for by name even if the listing does not show them.
        """
        infos = (self.describe(found) for found in sorted({*self.list_folders(), *known}, key=retention.age))
        return [info for info in infos if info is not None]

    def describe(self, checkpoint: CheckpointId) -> CheckpointInfo | None:
        """What there is to say about a checkpoint without reading its data; None: not committed."""
        try:
            found = self.read_manifest(checkpoint)
        except CheckpointError as error:
            return CheckpointInfo(id=checkpoint, rejected=str(error))
        if found is None:
            return None
        wrong = [self._wrong_size(checkpoint, file) for part in found.parts for file in _files(part)]
        rejected = next(filter(None, wrong), "") or self._read_rejection(checkpoint)
        return CheckpointInfo(
            id=checkpoint, kind=found.plan.kind, finite=found.finite, nbytes=found.nbytes, rejected=rejected
        )

    def verify(self, checkpoint: CheckpointId) -> list[str]:
        """Read everything; returns what is wrong (empty: nothing)."""
        try:
            found = self.read_manifest(checkpoint)
        except CheckpointError as error:
            return [str(error)]
        if found is None:
            return [f"{checkpoint.folder}: not committed (no manifest)"]
        problems = []
        there = self.read_plan(checkpoint)
        if there != found.plan:
            problems.append(f"{checkpoint.folder}/{manifest.PLAN}: missing, damaged or not the manifest's plan")
        for part in found.parts:
            if self.read_part(found.plan, part.rank) != part:
                problems.append(f"{checkpoint.folder}/{manifest.part_record(part.rank)}: missing or damaged")
            for file in _files(part):
                problems += self.verify_file(checkpoint, file)
            problems += self._check_entries(found, part)
        return problems

    def verify_file(self, checkpoint: CheckpointId, file: StoredFile) -> list[str]:
        """Check all blocks of a file; returns what is wrong."""
        where = f"{checkpoint.folder}/{file.name}"
        if file.algorithm != CHECKSUM_ALGORITHM:
            return [f"{where}: checksum {file.algorithm!r} is not known to this version"]
        try:
            with self._open(checkpoint, file.name) as reader:
                if reader.nbytes != file.nbytes:
                    return [f"{where}: {reader.nbytes} bytes, {file.nbytes} were written"]
                for index, expected in enumerate(file.blocks):
                    if zlib.crc32(reader.read_at(index * BLOCK_BYTES, BLOCK_BYTES)) != expected:
                        return [f"{where}: block {index} is damaged (checksum)"]
        except StorageError as error:
            if error.kind != "gone":
                raise
            return [f"{where}: missing"]
        return []

    def read_file(self, checkpoint: CheckpointId, file: StoredFile) -> bytes:
        """The whole content of a small file. Raises CheckpointError when it is not what was written."""
        problems = self.verify_file(checkpoint, file)
        if problems:
            raise CheckpointError(problems[0])
        with self._open(checkpoint, file.name) as reader:
            return reader.read_at(0, reader.nbytes)

    def read_header(self, checkpoint: CheckpointId, file: StoredFile) -> bytes:
        """The bytes before a data file's first tensor. Raises CheckpointError when there are none."""
        try:
            with self._open(checkpoint, file.name) as reader:
                head = reader.read_at(0, _HEADER_GUESS_BYTES)
                nbytes = tensorfile.header_bytes(head[:8])
                return head[:nbytes] if nbytes <= len(head) else reader.read_at(0, nbytes)
        except tensorfile.TensorFileError as error:
            raise CheckpointError(f"{checkpoint.folder}/{file.name}: {error}") from None

    def has_marker(self, name: str) -> bool:
        """Whether the job's folder has this file."""
        return _again(lambda: base.read(self.store, f"{self._folder}/{name}")) is not None

    def set_marker(self, name: str, content: dict[str, str]) -> None:
        """Create a small file in the job's folder, if there is none."""
        _again(lambda: self.store.create(f"{self._folder}/{name}", _seal(codec.dumps(content))))

    # -- rejecting and deleting -------------------------------------------------------------------

    def reject(self, checkpoint: CheckpointId, reason: str) -> None:
        """Mark a checkpoint as damaged, for all that look for one."""
        body = _seal(codec.dumps({"reason": reason}))
        _again(lambda: self.store.create(self.path(checkpoint, REJECTED), body))

    def delete(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint: the manifest first, so that what is left half removed counts for nobody."""
        self._whole = {row for row in self._whole if row[0] != checkpoint}
        folder = f"{self._folder}/{checkpoint.folder}"
        _again(lambda: self.store.remove(f"{folder}/{manifest.MANIFEST}"))
        for name in _again(lambda: self.store.list(folder)):
            _again(lambda path=f"{folder}/{name}": self.store.remove(path))  # type: ignore[misc]
        _again(lambda: self.store.remove(folder))

    def retain(
        self, keep: retention.Keep, in_use: Collection[CheckpointId], in_progress: Collection[CheckpointId] = ()
    ) -> tuple[CheckpointId, ...]:
        """Delete what is not to be kept, remains of older saves included; returns it."""
        infos = self.list_checkpoints(in_use)
        committed = [info.id for info in infos]
        good = [info.id for info in infos if info.finite and not info.rejected]
        open_ = [found for found in self.list_folders() if found not in committed]
        gone = retention.choose_deletions(infos, keep, in_use)
        gone += retention.choose_remains(open_, good, {*in_progress, *in_use})
        for checkpoint in gone:
            self.delete(checkpoint)
        return gone

    # -- helpers ----------------------------------------------------------------------------------

    def _write_summed(
        self, checkpoint: CheckpointId, name: str, content: Sequence[Source], cancelled: Callable[[], bool]
    ) -> StoredFile:
        sums: list[int] = []
        nbytes = sum(end - begin for _, begin, end in content)

        def write() -> None:
            sums.clear()
            self.store.write(self.path(checkpoint, name), streams.summed(content, sums, cancelled), nbytes)

        _again(write)
        return StoredFile(name=name, nbytes=nbytes, blocks=tuple(sums))

    def _open(self, checkpoint: CheckpointId, name: str) -> contextlib.AbstractContextManager[base.Reader]:
        return self.store.open(self.path(checkpoint, name))

    def _wrong_size(self, checkpoint: CheckpointId, file: StoredFile) -> str:
        if (checkpoint, file) in self._whole:
            return ""

        def size() -> int:
            with self._open(checkpoint, file.name) as reader:
                return reader.nbytes

        try:
            found = _again(size)
        except StorageError as error:
            if error.kind != "gone":
                raise
            return f"{checkpoint.folder}/{file.name}: missing"
        if found == file.nbytes:
            if self.local_path(checkpoint, file.name) is None:
                self._whole.add((checkpoint, file))
            return ""
        return f"{checkpoint.folder}/{file.name}: {found} bytes, {file.nbytes} were written"

    def _check_entries(self, found: Manifest, part: PartRecord) -> list[str]:
        """The file's own header must name the chunks that the manifest puts there."""
        if part.data is None:
            return []
        where = f"{found.id.folder}/{part.data.name}"
        try:
            entries, _ = tensorfile.parse_header(self.read_header(found.id, part.data), part.data.nbytes)
        except (StorageError, CheckpointError, tensorfile.TensorFileError) as error:
            return [f"{where}: {error}"]
        there = {entry.name: (entry.begin, entry.end) for entry in entries}
        wanted = {found.plan.chunks[c.chunk_id].key: (c.begin, c.end) for c in part.chunks}
        return [] if there == wanted else [f"{where}: holds other tensors than the manifest says"]

    def _read_rejection(self, checkpoint: CheckpointId) -> str:
        path = self.path(checkpoint, REJECTED)
        data = _again(lambda: base.read(self.store, path))
        if data is None:
            return ""
        found = _unseal(dict[str, str], data)
        return found.get("reason", "") if found else "it was marked as damaged"

    def _read(self, kind: type[T], path: str) -> T | None:
        data = _again(lambda: base.read(self.store, path))
        return None if data is None else _unseal(kind, data)


def part_layout(plan: CheckpointPlan, chunk_ids: Sequence[int]) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """Header and chunk offsets of the file that holds these chunks of the plan."""
    table = pieces.PieceTable(generation=plan.generation, topology=plan.topology, chunks=plan.chunks, pieces=())
    return pieces.part_layout(table, chunk_ids)


def _id(plan: CheckpointPlan) -> CheckpointId:
    return CheckpointId(step=plan.step, attempt=plan.attempt)


def _files(part: PartRecord) -> list[StoredFile]:
    return [file for file in (part.data, part.record) if file is not None]


def _again(action: Callable[[], T]) -> T:
    """A stale handle goes away when the path is opened anew."""
    try:
        return action()
    except StorageError as error:
        if error.kind != "stale":
            raise
        return action()


def _seal(body: bytes) -> bytes:
    """With a line of checksum, as the manifest has it: a torn file is recognised."""
    return body + b"\n" + f"crc32 {zlib.crc32(body):08x}\n".encode()


def _unseal(kind: type[T], data: bytes) -> T | None:
    body, _, tail = data.partition(b"\n")
    if tail != f"crc32 {zlib.crc32(body):08x}\n".encode():
        return None
    try:
        return codec.loads(kind, body)
    except codec.DecodeError:
        return None
