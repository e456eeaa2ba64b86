"""What stands in commit areas, records and plans of the memory volume."""

from __future__ import annotations

import dataclasses
import zlib

CHECKSUM_ALGORITHM = "crc32"
BLOCK_BYTES = 8 * 1024 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """
    Commit record of a part file, written last. `rank` is the rank whose part it is (not who wrote it).
    `blocks` are checksums of each 8 MiB of the whole file; `finite` False marks a state with NaN or infinity.
    """

    step: int
    attempt: int
    rank: int
    generation: int
    file_bytes: int
    blocks: tuple[int, ...]
    algorithm: str = CHECKSUM_ALGORITHM
    finite: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordHead:
    """
    Head of a small record (metadata key "head" of a tensor file in a record area).

    A provisional record is written at the optimizer's pre-hook for the step that the update will end; it
    counts only if `exact`: so far each boundary's own part (RNG, loader, buffers, objects) equalled it.
    """

    step: int
    attempt: int
    rank: int
    generation: int
    provisional: bool = False
    exact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """
    Snapshot at every step s >= from_step with (s - from_step) % every_steps == 0; persist every
    `persist_every`-th of them (0 = never). `stop_after` set: all ranks stop after that step.
    """

    number: int = 0
    every_steps: int = 1
    persist_every: int = 1
    from_step: int = 0
    stop_after: int | None = None

    def snapshots(self, step: int) -> bool:
        """Whether the boundary of `step` is snapshotted."""
        if self.stop_after is not None and step == self.stop_after:
            return True
        return step >= self.from_step and step > 0 and (step - self.from_step) % self.every_steps == 0

    def persists(self, step: int) -> bool:
        """Whether the snapshot of `step` goes to storage."""
        if self.stop_after is not None and step == self.stop_after:
            return True
        if not self.persist_every or not self.snapshots(step):
            return False
        return ((step - self.from_step) // self.every_steps) % self.persist_every == 0


def block_checksums(data: memoryview | bytes) -> tuple[int, ...]:
    """crc32 of each block of 8 MiB."""
    view = memoryview(data)
    return tuple(zlib.crc32(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES))
