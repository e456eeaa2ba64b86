"""
Reads tensor files into live tensors, block by block with checksums, straight into place where that can be.

Files on storage are read, not mapped: a truncated or stale file must be an error, not a SIGBUS.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from lastwords.protocol import chunks as chunks_
from lastwords.protocol import snapshots, tensorfile, wire
from lastwords.protocol.chunks import Chunk
from lastwords.trainer import copying, memory, served
from lastwords.trainer.collect import Live

_STRIDE_BYTES = 512 * 1024


class RestoreError(RuntimeError):
    """The source is damaged or incomplete; the text names the file and what is wrong."""


class WrongModelError(RuntimeError):
    """The source is of another model; the text says what differs."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A chunk and where it lies."""

    chunk: Chunk
    file: wire.RestoreFile
    begin: int
    end: int


def find_sources(files: Sequence[wire.RestoreFile], chunks: Iterable[Chunk]) -> dict[str, list[Source]]:
    """Tensor name -> its chunks in the files; of a chunk that several files have, the first."""
    by_key = {chunk.key: chunk for chunk in chunks}
    found: dict[str, Source] = {}
    for file in files:
        for entry in read_entries(file):
            chunk = by_key.get(entry.name)
            if chunk is not None and entry.name not in found:
                if (entry.dtype, entry.shape) != (chunk.dtype, chunk.sizes):
                    raise RestoreError(f"{file.path}: {entry.name} does not have the form that its list says")
                found[entry.name] = Source(chunk, file, entry.begin, entry.end)
    result: dict[str, list[Source]] = {}
    for source in found.values():
        result.setdefault(source.chunk.name, []).append(source)
    return result


def read_entries(file: wire.RestoreFile) -> tuple[tensorfile.Entry, ...]:
    """Header of a tensor file. Raises RestoreError."""
    try:
        with open(file.path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if file.nbytes and size != file.nbytes:
                raise RestoreError(f"{file.path} has {size} bytes, it should have {file.nbytes}")
            first = stream.read(8)
            head = first + stream.read(tensorfile.header_bytes(first) - 8)
            return tensorfile.parse_header(head, size)[0]
    except (OSError, tensorfile.TensorFileError) as error:
        raise RestoreError(f"{file.path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Bytes [begin, end) of a file go to `address`."""

    begin: int
    end: int
    address: int


def fill(targets: Sequence[Live], sources: Mapping[str, Sequence[Source]]) -> None:
    """
    Every target from the chunks that overlap it. Raises RestoreError when one is not covered or a block is bad.

    On error some targets may have been written: the process must not go on.
    """
    pieces: dict[str, list[_Piece]] = {}
    files: dict[str, wire.RestoreFile] = {}
    staged: list[tuple[Live, Source, np.ndarray]] = []
    for target in targets:
        covered = 0
        for source in sources.get(target.chunk.name, ()):
            shared = chunks_.overlap(target.chunk, source.chunk)
            if shared is None:
                continue
            covered += int(np.prod(shared[1], dtype=np.int64))
            files[source.file.path] = source.file
            direct = target.local.device.type == "cpu" and target.local.is_contiguous()
            if direct and (source.chunk.offsets, source.chunk.sizes) == (target.chunk.offsets, target.chunk.sizes):
                address = target.local.data_ptr()
            else:
                buffer = np.empty(source.end - source.begin, dtype=np.uint8)
                staged.append((target, source, buffer))
                address = buffer.ctypes.data
            pieces.setdefault(source.file.path, []).append(_Piece(source.begin, source.end, address))
        if covered != int(np.prod(target.chunk.sizes, dtype=np.int64)):
            raise RestoreError(f"{target.chunk.key} is not in the files that were given")
    for path, parts in pieces.items():
        _read(files[path], sorted(parts, key=lambda piece: piece.begin))
    for target, source, buffer in staged:
        _put_box(target, source, buffer)


def _read(file: wire.RestoreFile, parts: Sequence[_Piece]) -> None:
    """One pass over the blocks that hold what is wanted, each straight to its place."""
    if file.served:
        _read_served(file, parts)
        return
    taken: list[_Piece] = []
    again: list[_Piece] = []  # what lies in bytes that are read to another place already
    for part in parts:
        (again if taken and part.begin < taken[-1].end else taken).append(part)
    with open(file.path, "rb", buffering=0) as stream:
        # Where the file is too short for what is wanted of it, reading it says so.
        size = max(os.fstat(stream.fileno()).st_size, *(part.end for part in taken), 0)
        for number in sorted({n for part in taken for n in _block_numbers(part)}):
            begin, end = number * snapshots.BLOCK_BYTES, min((number + 1) * snapshots.BLOCK_BYTES, size)
            inside = [part for part in taken if part.begin < end and part.end > begin]
            _check_block(file, number, _read_block(stream.fileno(), inside, begin, end, file))
    if again:
        _read(file, again)


def _read_served(file: wire.RestoreFile, parts: Sequence[_Piece]) -> None:
    size = snapshots.BLOCK_BYTES
    numbers = sorted({n for part in parts for n in _block_numbers(part)})
    try:
        for number, view in served.blocks(file, numbers):
            _check_block(file, number, zlib.crc32(view) if _sums(file) else 0)
            begin = number * size
            _hand_out(parts, begin, begin + len(view), np.frombuffer(view, dtype=np.uint8).ctypes.data)
    except served.ServedError as error:
        raise RestoreError(str(error)) from None


def _sums(file: wire.RestoreFile) -> bool:
    """Whether what is read has to be compared with checksums."""
    return bool(file.blocks) and not file.checked


def _check_block(file: wire.RestoreFile, number: int, checksum: int) -> None:
    if _sums(file) and (number >= len(file.blocks) or checksum != file.blocks[number]):
        raise RestoreError(f"{file.served or file.path}: block {number} is damaged (its checksum is not the one noted)")


def _hand_out(parts: Sequence[_Piece], begin: int, end: int, address: int) -> None:
    """Copy what the bytes `begin` to `end` of the file, which are at `address`, hold of these pieces."""
    for part in parts:
        if part.begin >= end:
            break
        lo, hi = max(part.begin, begin), min(part.end, end)
        if hi > lo:
            copying.move_free(part.address + lo - part.begin, address + lo - begin, hi - lo)


def _block_numbers(part: _Piece) -> range:
    return range(part.begin // snapshots.BLOCK_BYTES, -(-part.end // snapshots.BLOCK_BYTES))


def _read_block(descriptor: int, inside: Sequence[_Piece], begin: int, end: int, file: wire.RestoreFile) -> int:
    """Read the parts' bytes in [begin, end) to their places; the block's checksum where there is one to compare."""
    checksum, at = 0, begin
    spare = bytearray(_STRIDE_BYTES)
    spans = [(max(part.begin, begin), min(part.end, end), part) for part in inside]
    for lo, hi, part in spans:
        if _sums(file):
            checksum = _read_span(descriptor, memoryview(spare), at, lo, checksum, file)
        address = part.address + lo - part.begin
        memory.populate(address, hi - lo)
        target = memoryview((ctypes.c_char * (hi - lo)).from_address(address)).cast("B")
        checksum = _read_span(descriptor, target, lo, hi, checksum, file)
        at = hi
    return _read_span(descriptor, memoryview(spare), at, end, checksum, file) if _sums(file) else 0


def _read_span(descriptor: int, target: memoryview, begin: int, end: int, checksum: int, file: wire.RestoreFile) -> int:
    """
    Read [begin, end) into `target`, over and over from its front where it is smaller; the checksum so far.

    In strides that are still in the processor's cache when they are summed up.
    """
    place = 0
    while begin < end:
        room = len(target) - place
        if not room:
            place, room = 0, len(target)
        piece = target[place : place + min(_STRIDE_BYTES, room, end - begin)]
        try:
            count = os.preadv(descriptor, [piece], begin)
        except OSError as error:
            raise RestoreError(f"{file.path}: {error}") from None
        if count == 0:
            raise RestoreError(f"{file.path} ends at {begin} bytes")
        if _sums(file):
            checksum = zlib.crc32(piece[:count], checksum)
        begin += count
        place += count
    return checksum


def _put_box(target: Live, source: Source, buffer: np.ndarray) -> None:
    shared = chunks_.overlap(target.chunk, source.chunk)
    assert shared is not None
    offsets, sizes = shared
    whole = torch.from_numpy(buffer).view(getattr(torch, source.chunk.dtype)).reshape(source.chunk.sizes)
    part = whole[_slices(offsets, sizes, source.chunk)]
    with torch.no_grad():
        target.local[_slices(offsets, sizes, target.chunk)].copy_(part)


def _slices(offsets: Sequence[int], sizes: Sequence[int], chunk: Chunk) -> tuple[slice, ...]:
    rows = zip(offsets, sizes, chunk.offsets, strict=True)
    return tuple(slice(o - base, o - base + n) for o, n, base in rows)
