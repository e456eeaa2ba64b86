"""What an agent must still know after its own death: one small file in the memory volume, replaced whole."""

from __future__ import annotations

import dataclasses
import os

from lastwords.protocol import codec, wire
from lastwords.protocol.messages import RestorePlan, RunState, WorkerOrder

FILE = "agent.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Written before whatever follows from it is done."""

    job_uid: str = ""
    order: WorkerOrder | None = None
    """The newest one: lower ones are refused, and the state can be kept even if the coordinator does not come back."""
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


def load(folder: str, job_uid: str) -> Memory:
    """What the last agent of this job in this volume knew; an empty memory when there was none."""
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            memory = codec.loads(Memory, file.read())
    except (FileNotFoundError, codec.DecodeError):
        return Memory(job_uid=job_uid)
    if memory.job_uid != job_uid:
        return Memory(job_uid=job_uid)
    order = memory.order
    if order is None:
        return memory
    if order.run is RunState.ENDED:
        # It was carried out: whoever starts an agent again means the job to go on.
        return dataclasses.replace(memory, order=None)
    # Holds are counted anew by each agent.
    return dataclasses.replace(memory, order=dataclasses.replace(order, release_hold=0))


def store(folder: str, memory: Memory) -> None:
    """Replace the file: it is either the old or the new one."""
    path = os.path.join(folder, FILE)
    with open(f"{path}.new", "wb") as file:
        file.write(codec.dumps(memory))
    os.rename(f"{path}.new", path)
