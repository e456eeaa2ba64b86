"""
The trainer's side of the memory volume: slots (part, record, commit area), record areas, and pins.

All memory is allocated with `posix_fallocate` before it is mapped: a volume that is full gives an error with
figures here, never a SIGBUS in the middle of training.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

from lastwords.protocol import areas, codec, volume
from lastwords.protocol.snapshots import SlotRecord
from lastwords.trainer import memory


class NoMemoryError(OSError):
    """The memory volume is too small; the text has both figures."""


class Mapped:
    """A file of the volume, mapped whole."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Make the file `nbytes` long. Raises NoMemoryError."""
        self.path = path
        self.nbytes = nbytes
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != nbytes:
                os.ftruncate(file, nbytes)
            os.posix_fallocate(file, 0, nbytes)
            self._map = mmap.mmap(file, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free = free_bytes(os.path.dirname(path))
            # What the failed allocation took would stay taken.
            os.ftruncate(file, 0)
            raise NoMemoryError(
                errno.ENOSPC, f"{nbytes} bytes are needed for {os.path.basename(path)}, {free} are free"
            ) from None
        finally:
            os.close(file)
        self._mapped = False
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def prefault(self) -> None:
        """Map all pages at once, when they are about to be written. Contents stay."""
        if not self._mapped:
            memory.populate(self.address, self.nbytes)
            self._mapped = True


class Slot:
    """One part of one rank in one slot: file, commit area, record."""

    def __init__(self, folder: str, slot: int, rank: int) -> None:
        self.slot = slot
        self.rank = rank
        self._data_path = os.path.join(folder, volume.part(slot, rank))
        self._record_path = os.path.join(folder, volume.part_rank_record(slot, rank))
        self.commit = Mapped(os.path.join(folder, volume.part_commit(slot, rank)), volume.COMMIT_AREA_BYTES)
        self.data: Mapped | None = None
        self._record: Mapped | None = None

    def committed(self) -> SlotRecord | None:
        """What stands in the slot, or None when it is empty, torn or being written."""
        body = areas.read(self.commit.view)
        if body is None:
            return None
        try:
            return codec.loads(SlotRecord, body)
        except codec.DecodeError:
            return None

    def resize(self, nbytes: int) -> Mapped:
        """The part's memory with this size. The slot must be invalid. Raises NoMemoryError."""
        if self.data is None or self.data.nbytes != nbytes or not _same_file(self.data):
            self.data = None
            self.data = Mapped(self._data_path, nbytes)
        return self.data

    def allocated_bytes(self) -> int:
        """Bytes that the part's file has now."""
        return _allocated(self._data_path)

    def write_record(self, record: bytes) -> None:
        """Put the small record of the step beside the part, before the commit."""
        need = areas.HEADER_BYTES + len(record)
        if self._record is None or self._record.nbytes < need:
            self._record = Mapped(self._record_path, _rounded(2 * need))
        areas.commit(self._record.view, record)


class Records:
    """The four record areas of a rank. A record that outgrows them gets a new file, put in place whole."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, volume.records(rank))
        self._file: Mapped | None = None
        size = _allocated(self._path)
        if size and size % (volume.RECORD_AREAS * mmap.PAGESIZE) == 0:
            self._file = Mapped(self._path, size)

    def write(self, step: int, record: bytes, *, provisional: bool) -> None:
        """Commit the record of `step`. Raises NoMemoryError."""
        if self._file is None or areas.HEADER_BYTES + len(record) > self._capacity():
            self._grow(areas.HEADER_BYTES + len(record))
        areas.commit(self._area(volume.record_area_index(step, provisional=provisional)), record)

    def read(self, step: int, *, provisional: bool) -> bytes | None:
        """What stands in the area of `step` (the caller checks its head)."""
        if self._file is None:
            return None
        return areas.read(self._area(volume.record_area_index(step, provisional=provisional)))

    def _capacity(self) -> int:
        return self._file.nbytes // volume.RECORD_AREAS if self._file else 0

    def _area(self, index: int) -> memoryview:
        assert self._file is not None
        capacity = self._capacity()
        return self._file.view[index * capacity : (index + 1) * capacity]

    def _grow(self, need: int) -> None:
        capacity = _rounded(max(2 * need, 256 * 1024))
        new = Mapped(f"{self._path}.new", capacity * volume.RECORD_AREAS)
        for index in range(volume.RECORD_AREAS if self._file else 0):
            body = areas.read(self._area(index))
            if body is not None:
                areas.commit(new.view[index * capacity : (index + 1) * capacity], body)
        os.rename(new.path, self._path)
        new.path = self._path
        self._file = new


class Pins:
    """Which parts the agent is reading just now."""

    def __init__(self, folder: str, local_rank: int, processes_per_worker: int) -> None:
        self._path = os.path.join(folder, volume.PINS)
        self._local_rank = local_rank
        self._processes = processes_per_worker

    def pinned(self, slot: int) -> bool:
        """Whether the agent reads the rank's part in `slot`."""
        index = volume.pin_index(slot, self._local_rank, self._processes)
        # Read, not mapped: the agent makes the file, and may make it anew.
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return any(os.pread(file, 8, 8 * index))
        finally:
            os.close(file)


def free_bytes(folder: str) -> int:
    """Bytes that can still be allocated in the volume."""
    figures = os.statvfs(folder)
    return figures.f_bavail * figures.f_frsize


def slots_that_fit(folder: str, slots: Sequence[Slot], part_bytes: int, limit_bytes: int | None) -> tuple[int, int]:
    """How many slots of `part_bytes` fit (at most those given), and how many bytes there are for them."""
    have = sum(slot.allocated_bytes() for slot in slots)
    room = free_bytes(folder) + have
    if limit_bytes is not None:
        room = min(room, limit_bytes)
    return min(len(slots), room // part_bytes if part_bytes else len(slots)), room


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _same_file(mapped: Mapped) -> bool:
    """The agent may have put another file in place (a fetched part), or cut this one."""
    return _allocated(mapped.path) == mapped.nbytes


def _rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
