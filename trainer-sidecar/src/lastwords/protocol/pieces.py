"""
The piece table: which ranks hold what, who snapshots and writes what, and what a set of survivors covers.

    piece   the chunks that the same set of ranks hold
    share   a slice of a piece: what one of a worker's holders snapshots for the worker, so that nothing is
            copied twice within a worker. All workers slice a piece in the same way.
    part    all shares of one rank: one file in each slot

Everything is a pure function of (layouts, topology), so that every rank and agent gets the same answer
without talking. Sets of ranks and of shares are integer bitmasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from lastwords.protocol import chunks as chunks_
from lastwords.protocol import tensorfile
from lastwords.protocol.chunks import Chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Workers and ranks of an attempt; rank = worker * processes_per_worker + local rank."""

    workers: int
    processes_per_worker: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.workers * self.processes_per_worker

    def worker_of(self, rank: int) -> int:
        """Worker on which `rank` runs."""
        return rank // self.processes_per_worker

    def ranks_of(self, worker: int) -> range:
        """Ranks of `worker`, lowest first."""
        return range(worker * self.processes_per_worker, (worker + 1) * self.processes_per_worker)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Chunks (ids into the table's list) with the same holders (bitmask of ranks)."""

    holders: int
    chunk_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceTable:
    """The whole state of one layout generation. This is what `layout.json` in the memory volume holds."""

    generation: int
    topology: Topology
    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one full copy of the state."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class PieceSummary:
    """A piece as the coordinator sees it: no chunks, so that its size does not grow with the model."""

    holders: int
    nbytes: int
    chunks: int = 0
    """Number of chunks: a piece is not cut into more shares than that. 0: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSummary:
    """The piece table as it goes to the coordinator."""

    generation: int
    topology: Topology
    pieces: tuple[PieceSummary, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """Slice `index` of piece number `piece`; `count` slices in all."""

    piece: int
    index: int
    count: int
    holders: int


def bits(mask: int) -> list[int]:
    """Positions of the ones in a bitmask, lowest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def mask(positions: Iterable[int]) -> int:
    """Bitmask with ones at the given positions."""
    value = 0
    for position in positions:
        value |= 1 << position
    return value


def build_table(
    layouts: Mapping[int, Sequence[Chunk]], topology: Topology, generation: int, max_chunk_bytes: int | None = None
) -> PieceTable:
    """
    Piece table from the chunks that each rank holds (every rank of the topology must be there; may be empty).

    Raises LayoutError when a name means two things.
    """
    missing = sorted(set(range(topology.world)) - set(layouts))
    if missing:
        raise chunks_.LayoutError(f"no layout from ranks {missing}")
    chunks_.check_names(layouts)
    holders: dict[Chunk, int] = {}
    distinct: dict[tuple[Chunk, ...], int] = {}
    for rank, layout in layouts.items():
        key = tuple(layout)
        distinct[key] = distinct.get(key, 0) | (1 << rank)
    pieces_of = chunks_.atomise({chunk for layout in distinct for chunk in layout}, max_chunk_bytes)
    for layout, ranks in distinct.items():
        for chunk in layout:
            for atom in pieces_of[chunk]:
                holders[atom] = holders.get(atom, 0) | ranks
    ordered = tuple(sorted(holders))
    by_holders: dict[int, list[int]] = {}
    for index, chunk in enumerate(ordered):
        by_holders.setdefault(holders[chunk], []).append(index)
    pieces = tuple(Piece(mask_, tuple(ids)) for mask_, ids in sorted(by_holders.items(), key=lambda item: item[1]))
    return PieceTable(generation=generation, topology=topology, chunks=ordered, pieces=pieces)


def summarise(table: PieceTable) -> TableSummary:
    """What the coordinator needs of a table."""
    rows = tuple(
        PieceSummary(p.holders, sum(table.chunks[i].nbytes for i in p.chunk_ids), len(p.chunk_ids))
        for p in table.pieces
    )
    return TableSummary(generation=table.generation, topology=table.topology, pieces=rows)


def local_holders(holders: int, worker: int, topology: Topology) -> list[int]:
    """Ranks of `worker` in the bitmask."""
    n = topology.processes_per_worker
    return [worker * n + bit for bit in bits((holders >> (worker * n)) & ((1 << n) - 1))]


def shares(summary: TableSummary) -> tuple[Share, ...]:
    """
    All shares; a piece has as many as the worker with most holders of it has holders, but none without a chunk: a step
    must not be given up for want of a share that is empty.
    """
    result: list[Share] = []
    for number, piece in enumerate(summary.pieces):
        counts = (
            len(local_holders(piece.holders, worker, summary.topology)) for worker in range(summary.topology.workers)
        )
        count = min(max(counts, default=0), piece.chunks or piece.holders.bit_count())
        result.extend(Share(number, index, count, piece.holders) for index in range(count))
    return tuple(result)


def owner(share: Share, worker: int, topology: Topology) -> int | None:
    """The rank of `worker` that snapshots `share`, or None when nobody there holds it."""
    ranks = local_holders(share.holders, worker, topology)
    return ranks[share.index % len(ranks)] if ranks else None


def part_masks(summary: TableSummary) -> tuple[int, ...]:
    """For each rank the bitmask of shares that its part holds."""
    masks = [0] * summary.topology.world
    for bit, share in enumerate(shares(summary)):
        for worker in range(summary.topology.workers):
            rank = owner(share, worker, summary.topology)
            if rank is not None:
                masks[rank] |= 1 << bit
    return tuple(masks)


def live_masks(summary: TableSummary) -> tuple[int, ...]:
    """For each rank the bitmask of shares that it holds live."""
    masks = [0] * summary.topology.world
    for bit, share in enumerate(shares(summary)):
        for rank in bits(share.holders):
            masks[rank] |= 1 << bit
    return tuple(masks)


def full_mask(summary: TableSummary) -> int:
    """Bitmask of all shares: what a recoverable step needs."""
    return (1 << len(shares(summary))) - 1


def share_chunks(table: PieceTable) -> tuple[tuple[int, ...], ...]:
    """
    Chunk ids of each share, in the order of `shares`.

    Largest chunk first into the slice with the fewest bytes so far, counted over all pieces; each slice gets one.
    """
    result: list[list[int]] = []
    load: dict[int, int] = {}
    summary = summarise(table)
    counts = {share.piece: share.count for share in shares(summary)}
    for number, piece in enumerate(table.pieces):
        slices: list[list[int]] = [[] for _ in range(counts.get(number, 0))]
        for chunk_id in sorted(piece.chunk_ids, key=lambda i: (-table.chunks[i].nbytes, i)):
            empty = [index for index, ids in enumerate(slices) if not ids]
            target = min(empty or range(len(slices)), key=lambda index: (load.get(index, 0), index))
            slices[target].append(chunk_id)
            load[target] = load.get(target, 0) + table.chunks[chunk_id].nbytes
        result.extend(slices)
    return tuple(tuple(sorted(slice_)) for slice_ in result)


def part_chunks(table: PieceTable) -> tuple[tuple[int, ...], ...]:
    """Chunk ids of each rank's part."""
    by_share = share_chunks(table)
    return tuple(
        tuple(sorted(chunk_id for bit in bits(mask_) for chunk_id in by_share[bit]))
        for mask_ in part_masks(summarise(table))
    )


def part_layout(table: PieceTable, chunk_ids: Sequence[int]) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """
    Header of a part file and the (begin, end) file offsets of each chunk.

    Wide items come first, so that every tensor is aligned to its item size.
    """
    order = sorted(chunk_ids, key=lambda i: (-tensorfile.item_bytes(table.chunks[i].dtype), i))
    rows = [(table.chunks[i].key, table.chunks[i].dtype, table.chunks[i].sizes) for i in order]
    header, entries = tensorfile.build_header(rows)
    return header, {i: (entry.begin, entry.end) for i, entry in zip(order, entries, strict=True)}


@dataclasses.dataclass(frozen=True)
class WriteAssignment:
    """Which rank's part is the source of each chunk in a checkpoint; `missing` chunks have no source."""

    writes: dict[int, tuple[int, ...]]
    missing: tuple[int, ...]


def assign_writes(table: PieceTable, ready_parts: Iterable[int]) -> WriteAssignment:
    """
    Spread the chunks of a checkpoint over the parts (by rank) that are ready, each chunk once, bytes balanced.

    Chunks with fewest sources first, then the largest; the lightest part takes it. Periodic save: all
    parts are ready. Last words: those of the survivors.
    """
    contents = part_chunks(table)
    sources: dict[int, list[int]] = {}
    ready = sorted(set(ready_parts))
    for rank in ready:
        for chunk_id in contents[rank]:
            sources.setdefault(chunk_id, []).append(rank)
    load = dict.fromkeys(ready, 0)
    writes: dict[int, list[int]] = {rank: [] for rank in ready}
    order = sorted(sources, key=lambda i: (len(sources[i]), -table.chunks[i].nbytes, i))
    for chunk_id in order:
        rank = min(sources[chunk_id], key=lambda r: (load[r], r))
        writes[rank].append(chunk_id)
        load[rank] += table.chunks[chunk_id].nbytes
    missing = tuple(i for i in range(len(table.chunks)) if i not in sources)
    return WriteAssignment({rank: tuple(sorted(ids)) for rank, ids in writes.items()}, missing)
