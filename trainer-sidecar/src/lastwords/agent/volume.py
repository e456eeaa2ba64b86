"""
The agent's side of the memory volume: reads what the ranks wrote, and commits parts that it fetched.

Everything is read with `pread`, nothing is mapped: a rank may cut a file short at any time, which must be a refused
read and not a SIGBUS. What was read once is kept until its sequence number changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence

from lastwords.protocol import areas, codec, control, pieces, snapshots, tensorfile
from lastwords.protocol import volume as names
from lastwords.protocol.control import Phase, Word
from lastwords.protocol.messages import PartHolding, RecordHolding
from lastwords.protocol.snapshots import RecordHead, SlotRecord

NEIGHBOURS = "neighbour"
_STRIDE_BYTES = 512 * 1024
"""Small enough to be still in the processor's cache when it is summed up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A control block at one moment."""

    words: tuple[int, ...]
    phase: Phase | None

    def __getitem__(self, word: Word) -> int:
        return self.words[word]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A READY part: slot, what its commit area says, and the sequence it had."""

    slot: int
    record: SlotRecord
    sequence: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A small record that can be handed over."""

    head: RecordHead
    body: bytes
    neighbour: bool = False


class Volume:
    """The memory volume in `folder`."""

    def __init__(self, folder: str, slots: int) -> None:
        self.folder = folder
        self.slots = slots
        self._parts: dict[tuple[int, int], tuple[int, SlotRecord | None]] = {}
        self._records: dict[tuple[str, int], tuple[tuple[int, int], Record | None]] = {}
        self._neighbours: dict[str, Record] = {}
        self._layout: tuple[tuple[int, int, int], pieces.PieceTable | None] = ((0, 0, 0), None)
        os.makedirs(self.path(NEIGHBOURS), exist_ok=True)
        self._load_neighbours()

    def path(self, name: str) -> str:
        """Path of a file in the volume."""
        return os.path.join(self.folder, name)

    # -- control blocks and layout ----------------------------------------------------------------

    def block(self, rank: int) -> Block | None:
        """The rank's control block, or None when no process has begun one."""
        data = _read_file(self.path(names.control(rank)), 0, control.BLOCK_BYTES)
        view = memoryview(data)
        if len(view) < control.BLOCK_BYTES or not control.is_valid(view):
            return None
        return Block(words=tuple(control.get(view, word) for word in Word), phase=control.get_phase(view))

    def table(self) -> pieces.PieceTable | None:
        """The layout in force, or None."""
        path = self.path(names.LAYOUT)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._layout[0]:
            try:
                table = codec.loads(pieces.PieceTable, _read_file(path, 0, found.st_size))
            except codec.DecodeError:
                table = None
            self._layout = (stamp, table)
        return self._layout[1]

    def write_table(self, data: bytes) -> None:
        """Put a layout that came from another worker in place."""
        path = self.path(names.LAYOUT)
        with open(f"{path}.fetched", "wb") as file:
            file.write(data)
        os.rename(f"{path}.fetched", path)

    # -- parts ------------------------------------------------------------------------------------

    def part(self, slot: int, rank: int) -> Part | None:
        """The part of `rank` in `slot`, when it is READY."""
        path = self.path(names.part_commit(slot, rank))
        key = (slot, rank)
        sequence = _sequence(path)
        if sequence == 0 or sequence & 1:
            self._parts.pop(key, None)
            return None
        known = self._parts.get(key)
        if known is None or known[0] != sequence:
            record = None
            body = areas.read(memoryview(_read_file(path, 0, names.COMMIT_AREA_BYTES)))
            with contextlib.suppress(codec.DecodeError):
                record = codec.loads(SlotRecord, body) if body is not None else None
            known = self._parts[key] = (sequence, record)
        if known[1] is None or known[1].rank != rank:
            return None
        return Part(slot=slot, record=known[1], sequence=sequence)

    def parts(self, ranks: Sequence[int]) -> list[Part]:
        """All READY parts of these ranks."""
        found = (self.part(slot, rank) for rank in ranks for slot in range(self.slots))
        return [part for part in found if part is not None]

    def find_part(self, rank: int, step: int, attempt: int) -> Part | None:
        """The part of `rank` at (step, attempt)."""
        for slot in range(self.slots):
            part = self.part(slot, rank)
            if part is not None and (part.record.step, part.record.attempt) == (step, attempt):
                return part
        return None

    def unchanged(self, part: Part) -> bool:
        """Whether nobody has touched the part since `part` was read."""
        return _sequence(self.path(names.part_commit(part.slot, part.record.rank))) == part.sequence

    def discard(self, part: Part) -> None:
        """A part that turned out to be damaged is no part any more."""
        path = self.path(names.part_commit(part.slot, part.record.rank))
        with _opened(path, os.O_RDWR) as file:
            os.pwrite(file, (part.sequence | 1).to_bytes(8, "little"), 0)

    def bad_block(self, part: Part) -> int | None:
        """Number of the first block whose checksum is wrong; None: all are right. Blocks for long."""
        record = part.record
        stride = memoryview(bytearray(_STRIDE_BYTES))
        with _opened(self.path(names.part(part.slot, record.rank)), os.O_RDONLY) as file:
            for number, expected in enumerate(record.blocks):
                at = number * snapshots.BLOCK_BYTES
                end = min(at + snapshots.BLOCK_BYTES, record.file_bytes)
                checksum = 0
                while at < end and (count := os.preadv(file, [stride[: end - at]], at)):
                    checksum = zlib.crc32(stride[:count], checksum)
                    at += count
                if at < end or checksum != expected:
                    return number
        return None

    def pin(self, slot: int, local_rank: int, processes_per_worker: int, value: int) -> None:
        """Tell the rank that the agent reads its part in `slot` (step + 1), or does not any more (0)."""
        size = 8 * self.slots * processes_per_worker
        with _opened(self.path(names.PINS), os.O_RDWR | os.O_CREAT) as file:
            if os.fstat(file).st_size < size:
                os.posix_fallocate(file, 0, size)
            os.pwrite(file, value.to_bytes(8, "little"), 8 * names.pin_index(slot, local_rank, processes_per_worker))

    def unpin_all(self, processes_per_worker: int) -> None:
        """Pins of an agent that died are void."""
        for slot in range(self.slots):
            for local_rank in range(processes_per_worker):
                self.pin(slot, local_rank, processes_per_worker, 0)

    def holdings(self, ranks: Sequence[int]) -> tuple[PartHolding, ...]:
        """READY parts as the coordinator wants them."""
        return tuple(
            PartHolding(
                rank=part.record.rank,
                slot=part.slot,
                step=part.record.step,
                attempt=part.record.attempt,
                generation=part.record.generation,
                finite=part.record.finite,
            )
            for part in self.parts(ranks)
        )

    # -- records ----------------------------------------------------------------------------------

    def records(self, ranks: Sequence[int]) -> list[Record]:
        """Everything that can be handed over, of each (rank, step, attempt) the best one: final before provisional."""
        best: dict[tuple[int, int, int], Record] = {}
        for record in (*self._own_records(ranks), *self._neighbours.values()):
            head = record.head
            if head.provisional and not head.exact:
                continue
            key = (head.rank, head.step, head.attempt)
            known = best.get(key)
            if known is None or (known.head.provisional and not head.provisional):
                best[key] = record
        return list(best.values())

    def record_holdings(self, ranks: Sequence[int]) -> tuple[RecordHolding, ...]:
        """Records as the coordinator wants them."""
        return tuple(
            RecordHolding(
                rank=record.head.rank,
                step=record.head.step,
                attempt=record.head.attempt,
                provisional=record.head.provisional,
                neighbour=record.neighbour,
            )
            for record in self.records(ranks)
        )

    def find_record(self, ranks: Sequence[int], rank: int, step: int, attempt: int) -> Record | None:
        """The best record of (rank, step, attempt)."""
        for record in self.records(ranks):
            if (record.head.rank, record.head.step, record.head.attempt) == (rank, step, attempt):
                return record
        return None

    def _own_records(self, ranks: Sequence[int]) -> Iterator[Record]:
        for rank in ranks:
            path = self.path(names.records(rank))
            with contextlib.suppress(FileNotFoundError):
                capacity = os.stat(path).st_size // names.RECORD_AREAS
                for index in range(names.RECORD_AREAS):
                    record = self._record(path, index, index * capacity, capacity)
                    if record is not None and record.head.rank == rank:
                        yield record
            for slot in range(self.slots):
                part = self.part(slot, rank)
                path = self.path(names.part_rank_record(slot, rank))
                record = self._record(path, 0, 0, None) if part is not None else None
                if part is not None and record is not None and _belongs(record.head, part.record):
                    yield record

    def _record(self, path: str, index: int, offset: int, capacity: int | None) -> Record | None:
        """The record in an area, read again only when it has changed."""
        key = (path, index)
        try:
            found = os.stat(path)
            sequence = _sequence(path, offset)
        except FileNotFoundError:
            return None
        if sequence == 0 or sequence & 1:
            return None
        stamp = (found.st_ino, sequence)
        known = self._records.get(key)
        if known is None or known[0] != stamp:
            size = capacity if capacity is not None else found.st_size
            body = _read_area(path, offset, size)
            record = parse_record(body) if body is not None and _sequence(path, offset) == sequence else None
            known = self._records[key] = (stamp, record)
        return known[1]

    # -- neighbours' records ----------------------------------------------------------------------

    def keep_neighbour(self, body: bytes, slot: int | None = None) -> bool:
        """
        Keep a record of another worker's rank; False when it is none.

        The last two steps of each kind, and with `slot` that of the snapshot in this slot of the rank.
        """
        record = parse_record(body)
        if record is None:
            return False
        head = record.head
        area = names.record_area_index(head.step, provisional=head.provisional)
        name = f"{head.rank:05d}-{area}" if slot is None else f"{head.rank:05d}-slot-{slot}"
        path = self.path(os.path.join(NEIGHBOURS, name))
        with open(f"{path}.new", "wb") as file:
            file.write(body)
        os.rename(f"{path}.new", path)
        self._neighbours[name] = dataclasses.replace(record, neighbour=True)
        return True

    def _load_neighbours(self) -> None:
        for name in os.listdir(self.path(NEIGHBOURS)):
            path = self.path(os.path.join(NEIGHBOURS, name))
            if name.endswith(".new"):
                os.unlink(path)
                continue
            with open(path, "rb") as file:
                record = parse_record(file.read())
            if record is not None:
                self._neighbours[name] = dataclasses.replace(record, neighbour=True)


def parse_record(body: bytes) -> Record | None:
    """A small record with its head, or None when it is none."""
    try:
        _, metadata = tensorfile.parse_header(body, len(body))
        return Record(head=codec.loads(RecordHead, metadata["head"]), body=body)
    except (tensorfile.TensorFileError, codec.DecodeError, KeyError):
        return None


def _belongs(head: RecordHead, part: SlotRecord) -> bool:
    return (head.rank, head.step, head.attempt) == (part.rank, part.step, part.attempt)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _read_file(path: str, offset: int, nbytes: int) -> bytes:
    """Bytes of a file; fewer when it is shorter, none when it is not there."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            return os.pread(file, nbytes, offset)
    except FileNotFoundError:
        return b""


def _sequence(path: str, offset: int = 0) -> int:
    data = _read_file(path, offset, 8)
    return int.from_bytes(data, "little") if len(data) == 8 else 0


def _read_area(path: str, offset: int, capacity: int) -> bytes | None:
    header = _read_file(path, offset, areas.HEADER_BYTES)
    length = int.from_bytes(header[8:16], "little")
    if len(header) < areas.HEADER_BYTES or length > capacity - areas.HEADER_BYTES:
        return None
    return areas.read(memoryview(_read_file(path, offset, areas.HEADER_BYTES + length)))
