"""What an agent must still know after its own death: one small file in the memory volume, replaced whole."""

from __future__ import annotations

import dataclasses
import os

from lastwords.protocol import codec, wire
from lastwords.protocol.messages import RestorePlan

FILE = "agent.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Written before whatever follows from it is done."""

    accepted_attempt: int = 0
    """Orders of a lower attempt are refused."""
    started_attempt: int = 0
    """Newest attempt whose ranks were ordered from a launcher, so that no attempt is started twice."""
    started_by: int = 0
    """Process id of that launcher."""
    hold_number: int = 0
    """Number of the newest `Hold`; ranks refuse lower ones."""
    held_attempt: int = 0
    """Attempt in which the worker holds itself; 0 = it does not."""
    layout_generation: int = 0
    layout_attempt: int = 0
    """Attempt that made the layout of that generation."""
    prepared_attempt: int = 0
    """Attempt whose ranks were or are to be welcomed with `welcomes`: its state must not be prepared again."""
    prepared_plan: RestorePlan | None = None
    welcomes: dict[int, wire.RestoreOrder] = dataclasses.field(default_factory=dict)


def load(folder: str) -> Memory:
    """What the last agent in this volume knew; an empty memory when there was none."""
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            return codec.loads(Memory, file.read())
    except (FileNotFoundError, codec.DecodeError):
        return Memory()


def store(folder: str, memory: Memory) -> None:
    """Replace the file: it is either the old or the new one."""
    path = os.path.join(folder, FILE)
    with open(f"{path}.new", "wb") as file:
        file.write(codec.dumps(memory))
    os.rename(f"{path}.new", path)
