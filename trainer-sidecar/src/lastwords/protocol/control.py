"""
The control block: one page per rank, written by the trainer, read by the agent, alive after the trainer's death.

Every field is one aligned 8-byte word, so that a reader never sees half of one. Times are nanoseconds of
CLOCK_MONOTONIC, which all containers of a pod share. The phase name is an area (`areas.py`) in the second half.
"""

from __future__ import annotations

import dataclasses
import enum

from lastwords.protocol import areas, codec

MAGIC = 0x4C57_4354_524C_3031  # "LWCTRL01"
BLOCK_BYTES = 4096
_PHASE_OFFSET = 2048


class Word(enum.IntEnum):
    """Index of each 8-byte word."""

    MAGIC = 0
    RANK = 1
    ATTEMPT = 2
    PID = 3
    STEP = 4
    """Boundaries passed, plus one; 0 = nothing restored yet in this attempt."""
    UPDATE_COUNTER = 5
    """Odd from the first optimizer pre-hook after a boundary until the next boundary."""
    BOUNDARY_NS = 6
    """When the last boundary was passed or the last phase began."""
    HOLD = 7
    """1 while a hold order is in force in the process."""
    AT_GATE = 8
    """1 while the main thread waits at the gate: gradients are there, the update has not begun."""
    FLOOR_STEP = 9
    """Newest step that this rank knows to be complete on all ranks, plus one; 0 = none."""
    PLAN_NUMBER = 10
    STALL_NS_TOTAL = 11
    SNAPSHOTS = 12
    SNAPSHOTS_SKIPPED = 13
    LAST_COPY_NS = 14
    LAST_STALL_NS = 15
    STEP_NS = 16
    """Duration of the last whole step (boundary to boundary)."""
    GENERATION = 17
    """Layout generation in force; 0 = no layout yet."""
    DONE = 18
    """1 once `steps()` has ended and the final state is in a snapshot."""
    LOSS_BITS = 19
    """An IEEE double that the script may show (`report(loss=…)`); 0 = none."""
    FIRST_STEP_NS = 20
    """When the first boundary after the restore was passed; 0 = not yet."""
    RESTORED_NS = 21
    """When the restore of this attempt was complete; 0 = not yet."""
    SNAPSHOTS_REJECTED = 22
    """Snapshots thrown away because a tensor changed while it was copied."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """What the script says it is doing now; `timeout_seconds` None means: the default of that name."""

    name: str
    timeout_seconds: float | None = None


def initialise(block: memoryview, *, rank: int, attempt: int, pid: int) -> None:
    """Begin a new attempt in `block`; the magic is written last."""
    words = block[:_PHASE_OFFSET].cast("Q")
    words[Word.MAGIC] = 0
    for word in Word:
        words[word] = 0
    words[Word.RANK] = rank
    words[Word.ATTEMPT] = attempt
    words[Word.PID] = pid
    set_phase(block, Phase("startup"))
    words[Word.MAGIC] = MAGIC


def is_valid(block: memoryview) -> bool:
    """Whether `block` is a control block that some attempt began."""
    return len(block) >= BLOCK_BYTES and block[:8].cast("Q")[0] == MAGIC


def get(block: memoryview, word: Word) -> int:
    """Read one word."""
    return int(block[:_PHASE_OFFSET].cast("Q")[word])


def put(block: memoryview, word: Word, value: int) -> None:
    """Write one word."""
    block[:_PHASE_OFFSET].cast("Q")[word] = value


def set_phase(block: memoryview, phase: Phase) -> None:
    """Name what the rank does now."""
    areas.commit(block[_PHASE_OFFSET:BLOCK_BYTES], codec.dumps(phase))


def get_phase(block: memoryview) -> Phase | None:
    """The phase, or None when it cannot be read: the caller must then take the longest deadline."""
    body = areas.read(block[_PHASE_OFFSET:BLOCK_BYTES])
    if body is None:
        return None
    try:
        return codec.loads(Phase, body)
    except codec.DecodeError:
        return None
