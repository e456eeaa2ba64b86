"""What a set of survivors covers: pure queries on the piece table's summary, with bitmasks of shares."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

from lastwords.protocol import pieces
from lastwords.protocol.pieces import TableSummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masks:
    """`parts` and `live` by rank: the shares in the rank's part, and those that it holds live. `nbytes` by share."""

    parts: tuple[int, ...]
    live: tuple[int, ...]
    full: int
    nbytes: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def masks(table: TableSummary) -> Masks:
    """The bitmasks of a table."""
    shares = pieces.shares(table)
    return Masks(
        parts=pieces.part_masks(table),
        live=pieces.live_masks(table),
        full=pieces.full_mask(table),
        nbytes=tuple(table.pieces[share.piece].nbytes // share.count for share in shares),
    )


def covered(table: TableSummary, *, live: Iterable[int] = (), parts: Iterable[int] = ()) -> int:
    """Shares that ranks `live` hold in their own memory or that stand in the parts of ranks `parts`."""
    known = masks(table)
    found = 0
    for rank in live:
        found |= known.live[rank]
    for rank in parts:
        found |= known.parts[rank]
    return found


def recoverable(table: TableSummary, *, live: Iterable[int] = (), parts: Iterable[int] = ()) -> bool:
    """Whether one step of the whole state can be put together from live ranks and parts of that step."""
    return covered(table, live=live, parts=parts) == masks(table).full


def part_sources(table: TableSummary, ready: Mapping[int, Iterable[int]]) -> tuple[dict[int, int], tuple[int, ...]]:
    """
    From whose memory each rank's part comes. `ready`: worker -> ranks whose parts stand in its memory.

    A rank's own worker comes first, else the worker that serves fewest so far of those that have all of the part's
    shares. Returns (part -> worker, parts that nobody can serve).
    """
    known = masks(table)
    topology = table.topology
    held = {worker: covered(table, parts=ranks) for worker, ranks in ready.items()}
    load = dict.fromkeys(held, 0)
    sources: dict[int, int] = {}
    missing = []
    for rank in range(topology.world):
        need = known.parts[rank]
        able = [worker for worker in held if need & ~held[worker] == 0]
        own = topology.worker_of(rank)
        if own in able or (need == 0 and not able):
            sources[rank] = own
        elif able:
            chosen = min(able, key=lambda worker: (load[worker], worker))
            load[chosen] += 1
            sources[rank] = chosen
        else:
            missing.append(rank)
    return sources, tuple(missing)


def copy_writers(table: TableSummary, frozen: Iterable[int], ready: Iterable[int]) -> dict[int, int]:
    """
    Who copies which part from live memory, over all workers: part (by rank) -> a rank of the same worker.

    `frozen` ranks stand still at the wanted step; parts in `ready` need no copy. Parts with the fewest able writers
    first, then the largest; of the able the one with the fewest bytes so far writes it.
    """
    known = masks(table)
    topology = table.topology
    still = sorted(set(frozen))
    done = set(ready)
    able: dict[int, list[int]] = {}
    for part in range(topology.world):
        if part not in done and known.parts[part]:
            writers = [
                rank
                for rank in still
                if topology.worker_of(rank) == topology.worker_of(part) and known.parts[part] & ~known.live[rank] == 0
            ]
            if writers:
                able[part] = writers
    load = dict.fromkeys(still, 0)
    result: dict[int, int] = {}
    for part in sorted(able, key=lambda part: (len(able[part]), -part_bytes(table, part), part)):
        # Its own part costs a rank least: no tie is broken against it.
        writer = min(able[part], key=lambda rank: (load[rank], rank != part, rank))
        load[writer] += part_bytes(table, part)
        result[part] = writer
    return dict(sorted(result.items()))


def part_bytes(table: TableSummary, rank: int) -> int:
    """Bytes in a rank's part, to within a share's rounding."""
    known = masks(table)
    return sum(known.nbytes[bit] for bit in pieces.bits(known.parts[rank]))
