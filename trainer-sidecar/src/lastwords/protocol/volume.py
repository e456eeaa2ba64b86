"""
Names in a worker's memory volume.

    control-00001             control block of rank 1
    records-00001             four record areas of rank 1 (see `records.area_index`)
    layout.json               chunks, pieces and part files of the layout generation in force
    slot-0-00001.safetensors  part of rank 1 in slot 0, written in place
    slot-0-00001.commit       its commit area: SlotRecord, written last
    slot-0-00001.record       one area: the small record of rank 1 at the slot's step (see `part_rank_record`)
    pins                      u64 per slot and local rank: step + 1 that the agent is reading, 0 = none
    agent.sock                where launcher and ranks find the agent
    neighbour/                records of another worker's ranks, kept by this agent
    stored/                   of a checkpoint in an object store: its small files, headers of the large ones, and a
                              socket at which the agent gives the blocks of these
"""

from __future__ import annotations

PINS = "pins"
LAYOUT = "layout.json"
AGENT_SOCKET = "agent.sock"
STORED = "stored"
STORED_SOCKET = "agent.sock"
COMMIT_AREA_BYTES = 64 * 1024
RECORD_AREAS = 4


def control(rank: int) -> str:
    """File of the control block of `rank`."""
    return f"control-{rank:05d}"


def records(rank: int) -> str:
    """File of the record areas of `rank`."""
    return f"records-{rank:05d}"


def part(slot: int, rank: int) -> str:
    """Part file: a safetensors file that holds what `rank` snapshots of the worker's state."""
    return f"slot-{slot}-{rank:05d}.safetensors"


def part_commit(slot: int, rank: int) -> str:
    """Commit area of a part file."""
    return f"slot-{slot}-{rank:05d}.commit"


def part_rank_record(slot: int, rank: int) -> str:
    """
    One area (the whole file) that holds the small record of `rank` at the step of the slot.

    The four record areas keep two steps only; this one lives as long as the part beside it. It is written before
    the part's commit area; it belongs to the part when step and attempt in its head are those of the commit.
    """
    return f"slot-{slot}-{rank:05d}.record"


def record_area_index(step: int, *, provisional: bool) -> int:
    """
    Which of the four areas takes the record of `step`.

    Two steps times (final, provisional): writing one never destroys the newest valid one of the others.
    """
    return 2 * (step % 2) + (1 if provisional else 0)


def pin_index(slot: int, local_rank: int, processes_per_worker: int) -> int:
    """Index of the pin word of a part."""
    return slot * processes_per_worker + local_rank
