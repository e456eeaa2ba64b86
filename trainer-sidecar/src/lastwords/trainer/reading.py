"""
Reads tensor files into live tensors, block by block with checksums, straight into place where that can be.

Files on storage are read, not mapped: a truncated or stale file must be an error, not a SIGBUS.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from lastwords.protocol import chunks as chunks_
from lastwords.protocol import snapshots, tensorfile, wire
from lastwords.protocol.chunks import Chunk
from lastwords.trainer import copying, served
from lastwords.trainer.collect import Live


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
    """One pass over the blocks that hold what is wanted."""
    if file.served:
        _read_served(file, parts)
        return
    block_bytes = snapshots.BLOCK_BYTES
    block = bytearray(block_bytes)
    view = memoryview(block)
    address = np.frombuffer(block, dtype=np.uint8).ctypes.data
    with open(file.path, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        first = 0
        for number in range(-(-size // block_bytes)):
            begin, end = number * block_bytes, min((number + 1) * block_bytes, size)
            while first < len(parts) and parts[first].end <= begin:
                first += 1
            if first == len(parts):
                break
            if parts[first].begin >= end:
                continue
            _read_block(stream.fileno(), view[: end - begin], begin, file.path)
            _check_block(file, number, view[: end - begin])
            _hand_out(parts[first:], begin, end, address)


def _read_served(file: wire.RestoreFile, parts: Sequence[_Piece]) -> None:
    size = snapshots.BLOCK_BYTES
    numbers = sorted({n for part in parts for n in range(part.begin // size, -(-part.end // size))})
    try:
        for number, view in served.blocks(file, numbers):
            _check_block(file, number, view)
            begin = number * size
            _hand_out(parts, begin, begin + len(view), np.frombuffer(view, dtype=np.uint8).ctypes.data)
    except served.ServedError as error:
        raise RestoreError(str(error)) from None


def _check_block(file: wire.RestoreFile, number: int, view: memoryview) -> None:
    if file.blocks and (number >= len(file.blocks) or zlib.crc32(view) != file.blocks[number]):
        raise RestoreError(f"{file.served or file.path}: block {number} is damaged (its checksum is not the one noted)")


def _hand_out(parts: Sequence[_Piece], begin: int, end: int, address: int) -> None:
    """Copy what the bytes `begin` to `end` of the file, which are at `address`, hold of these pieces."""
    for part in parts:
        if part.begin >= end:
            break
        lo, hi = max(part.begin, begin), min(part.end, end)
        if hi > lo:
            copying.move_free(part.address + lo - part.begin, address + lo - begin, hi - lo)


def _read_block(file: int, view: memoryview, offset: int, path: str) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise RestoreError(f"{path}: {error}") from None
        if count == 0:
            raise RestoreError(f"{path} ends at {offset + done} bytes")
        done += count


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
