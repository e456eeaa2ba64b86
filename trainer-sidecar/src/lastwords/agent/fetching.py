"""Builds a part in this worker's memory volume from the parts of another worker."""

from __future__ import annotations

import mmap
import os

from lastwords.agent.offload import Offload
from lastwords.agent.peers import PeerError, Peers
from lastwords.agent.volume import Part, Volume
from lastwords.protocol import areas, codec, pieces, snapshots
from lastwords.protocol import volume as names
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.protocol.snapshots import SlotRecord

_Move = tuple[int, int, int]
"""Bytes `begin` to `end` of the source part go to `target` of the new one."""


class PartFetch:
    """All workers cut pieces into the same shares, but may give them to other local ranks: bytes go chunk by chunk."""

    def __init__(self, volume: Volume, peers: Peers, offload: Offload, source: int, topology: Topology) -> None:
        self._volume = volume
        self._peers = peers
        self._offload = offload
        self._source = source
        self._topology = topology

    async def run(self, rank: int, step: int, attempt: int, record: bytes | None) -> Part:
        """The part of `rank`, committed here with its small record beside it. Raises PeerError."""
        remote = await self._peers.parts(self._source, step, attempt)
        if not remote:
            raise PeerError(f"worker {self._source} has no part of step {step} any more")
        table = await self._table(remote[0].record.generation)
        header, target = pieces.part_layout(table, pieces.part_chunks(table)[rank])
        moves = self._moves(table, remote, target)
        slot = self._choose_slot(rank, step)
        total = max((end for _, end in target.values()), default=len(header))
        invalidate(self._volume, slot, rank)
        file = allocated(self._volume.path(names.part(slot, rank)), total)
        try:
            os.pwrite(file, header, 0)
            for part, wanted in moves:
                await self._copy(part, wanted, file)
            sums = await self._offload.run(lambda: _checksums(file, total), 600.0, "the memory volume")
        finally:
            os.close(file)
        if record is not None:
            write_area(self._volume, names.part_rank_record(slot, rank), record)
        commit = SlotRecord(
            step=step,
            attempt=attempt,
            rank=rank,
            generation=table.generation,
            file_bytes=total,
            blocks=sums,
            finite=all(part.record.finite for part in remote),
        )
        write_area(self._volume, names.part_commit(slot, rank), codec.dumps(commit), names.COMMIT_AREA_BYTES)
        part_here = self._volume.part(slot, rank)
        assert part_here is not None
        return part_here

    async def _table(self, generation: int) -> PieceTable:
        """The layout of the parts; a new worker gets it from where the parts are."""
        table = self._volume.table()
        if table is None or table.generation != generation or table.topology != self._topology:
            data = await self._peers.layout(self._source)
            try:
                table = codec.loads(PieceTable, data)
            except codec.DecodeError as error:
                raise PeerError(f"worker {self._source} gave an unreadable layout: {error}") from None
            if (table.generation, table.topology) != (generation, self._topology):
                raise PeerError(f"worker {self._source} has parts of another layout than its own")
            self._volume.write_table(data)
        return table

    def _moves(
        self, table: PieceTable, remote: list[Part], target: dict[int, tuple[int, int]]
    ) -> list[tuple[Part, list[_Move]]]:
        """Which bytes of which part go where, each chunk once."""
        contents = pieces.part_chunks(table)
        open_ = set(target)
        moves = []
        for part in remote:
            _, there = pieces.part_layout(table, contents[part.record.rank])
            taken = sorted(open_ & set(there), key=lambda i: there[i])
            open_ -= set(taken)
            if taken:
                moves.append((part, [(*there[i], target[i][0]) for i in taken]))
        if open_:
            names_ = [table.chunks[i].key for i in sorted(open_)[:3]]
            raise PeerError(f"worker {self._source} does not hold {names_} ({len(open_)} chunks)")
        return moves

    async def _copy(self, part: Part, moves: list[_Move], file: int) -> None:
        size = snapshots.BLOCK_BYTES
        blocks = sorted({n for begin, end, _ in moves for n in range(begin // size, -(-end // size))})
        async for offset, data in self._peers.blocks(self._source, part, blocks):
            for begin, end, to in moves:
                low, high = max(begin, offset), min(end, offset + len(data))
                if low < high:
                    os.pwrite(file, data[low - offset : high - offset], to + low - begin)

    def _choose_slot(self, rank: int, step: int) -> int:
        """Empty, else one that the restored attempt can never use, else the oldest."""

        def worth(slot: int) -> tuple[bool, bool, int]:
            part = self._volume.part(slot, rank)
            held = part.record.step if part is not None else -1
            return part is not None, held <= step, held

        return min(range(self._volume.slots), key=worth)


def invalidate(volume: Volume, slot: int, rank: int) -> None:
    """Nobody takes the part for READY while it is written."""
    file = allocated(volume.path(names.part_commit(slot, rank)), names.COMMIT_AREA_BYTES)
    try:
        with mmap.mmap(file, names.COMMIT_AREA_BYTES) as mapped, memoryview(mapped) as view:
            areas.invalidate(view)
    finally:
        os.close(file)


def write_area(volume: Volume, name: str, body: bytes, size: int = 0) -> None:
    """Commit `body` to a file that is one area; `size` 0: as large as it needs, with room to grow."""
    path = volume.path(name)
    have = os.stat(path).st_size if os.path.exists(path) else 0
    need = size or max(have, -(-2 * (areas.HEADER_BYTES + len(body)) // mmap.PAGESIZE) * mmap.PAGESIZE)
    file = allocated(path, need)
    try:
        with mmap.mmap(file, need) as mapped, memoryview(mapped) as view:
            areas.commit(view, body)
    finally:
        os.close(file)


def allocated(path: str, nbytes: int) -> int:
    """The file with all its pages, so that a full volume is an error here and not a SIGBUS later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size != nbytes:
            os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _checksums(file: int, nbytes: int) -> tuple[int, ...]:
    sums: list[int] = []
    for begin in range(0, nbytes, snapshots.BLOCK_BYTES):
        sums += snapshots.block_checksums(os.pread(file, min(snapshots.BLOCK_BYTES, nbytes - begin), begin))
    return tuple(sums)
