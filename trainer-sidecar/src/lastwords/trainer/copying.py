"""
Copies of live tensors into a part file, fast and beside a main thread that works.

Large copies give up the GIL (`memmove` through ctypes); small ones keep it, since getting it back from a busy main
thread can take milliseconds each. Never `torch.set_num_threads` here: it would slow the main thread down.
"""

from __future__ import annotations

import ctypes
import dataclasses
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lastwords.protocol import pieces, snapshots
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.pieces import PieceTable
from lastwords.trainer.collect import Live
from lastwords.trainer.slots import Mapped

_SMALL_BYTES = 64 * 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _memmove(library: Any) -> Any:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    return function


move_free = _memmove(ctypes.CDLL(None))
"""memmove that gives up the GIL."""
move_held = _memmove(ctypes.PyDLL(None))
"""memmove that keeps the GIL."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One chunk: from a live box to its place in the file."""

    chunk: Chunk
    begin: int
    nbytes: int
    source: torch.Tensor


class PartCopy:
    """The copies that make up the part of one rank, from the live tensors of this process."""

    def __init__(self, table: PieceTable, rank: int, live: Sequence[Live]) -> None:
        """Raises KeyError with the chunk's name when this process does not hold what the part needs."""
        self.header, places = part_places(table, rank)
        held = by_name(live)
        self.copies = []
        for chunk_id, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
            chunk = table.chunks[chunk_id]
            self.copies.append(Copy(chunk, begin, end - begin, box(chunk, held)))
        self.nbytes = max((copy.begin + copy.nbytes for copy in self.copies), default=len(self.header))

    def run(self, target: Mapped) -> None:
        """Write header and all chunks."""
        target.prefault()
        target.view[: len(self.header)] = self.header
        for copy in self.copies:
            copy_out(copy.source, target.address + copy.begin, copy.nbytes)


def part_places(table: PieceTable, rank: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """Header of the rank's part file, and begin and end of each chunk in it."""
    return pieces.part_layout(table, pieces.part_chunks(table)[rank])


def by_name(live: Sequence[Live]) -> dict[str, list[Live]]:
    """What this process holds of each tensor."""
    found: dict[str, list[Live]] = {}
    for item in live:
        found.setdefault(item.chunk.name, []).append(item)
    return found


def box(chunk: Chunk, held: Mapping[str, Sequence[Live]]) -> torch.Tensor:
    """The live memory of `chunk`, which may be a part of a box of `held`. Raises KeyError with the chunk's name."""
    for live in held.get(chunk.name, ()):
        starts = [o - lo for o, lo in zip(chunk.offsets, live.chunk.offsets, strict=True)]
        ends = [s + n for s, n in zip(starts, chunk.sizes, strict=True)]
        if all(s >= 0 and e <= n for s, e, n in zip(starts, ends, live.chunk.sizes, strict=True)):
            if chunk.sizes == live.chunk.sizes:
                return live.local
            return live.local[tuple(slice(s, e) for s, e in zip(starts, ends, strict=True))]
    raise KeyError(chunk.key)


def copy_out(source: torch.Tensor, address: int, nbytes: int) -> None:
    """The bytes of `source`, in row-major order, to `address`."""
    if source.device.type == "cpu" and source.is_contiguous():
        move = move_held if nbytes < _SMALL_BYTES else move_free
        move(address, source.data_ptr(), nbytes)
        return
    if source.device.type != "cpu":
        _raw_tensor(address, nbytes).copy_(source.contiguous().reshape(-1).view(torch.uint8))
        return
    width = source.element_size()
    plain = torch.view_as_real(source) if source.is_complex() else source
    plain = plain.view(_INTEGERS[plain.element_size()])
    buffer: Any = (ctypes.c_char * nbytes).from_address(address)
    shape = tuple(plain.shape)
    target = np.frombuffer(buffer, dtype=np.dtype(f"i{width if not source.is_complex() else width // 2}")).reshape(
        shape
    )
    np.copyto(target, plain.numpy(), casting="unsafe")


def _raw_tensor(address: int, nbytes: int) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(buffer, dtype=torch.uint8)


# --- after the copy ---------------------------------------------------------------------------------


def is_finite(copies: Sequence[Copy], view: memoryview) -> bool:
    """Whether no floating-point tensor in the file has NaN or infinity."""
    return all(is_finite_chunk(copy.chunk.dtype, view[copy.begin : copy.begin + copy.nbytes]) for copy in copies)


def is_finite_chunk(dtype: str, data: memoryview) -> bool:
    """Whether the bytes of one chunk hold neither NaN nor infinity."""
    for begin in range(0, len(data), snapshots.BLOCK_BYTES):
        block = data[begin : begin + snapshots.BLOCK_BYTES]
        if dtype in ("float32", "float64", "complex64"):
            values: np.ndarray[Any, Any] = np.frombuffer(block, dtype="f8" if dtype == "float64" else "f4")
            # A sum is one pass without a temporary; only when it is not finite each value is looked at.
            with np.errstate(all="ignore"):
                if not np.isfinite(values.sum()) and not np.isfinite(values).all():
                    return False
        elif dtype in ("bfloat16", "float16"):
            exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
            bits = np.frombuffer(block, dtype="u2")
            if bool(((bits & exponent) == exponent).any()):
                return False
    return True


def bytes_of(source: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: its own memory where that can be, else a copy."""
    nbytes = source.numel() * source.element_size()
    if source.device.type == "cpu" and source.is_contiguous():
        return memoryview((ctypes.c_char * nbytes).from_address(source.data_ptr())).cast("B")
    data = np.empty(nbytes, dtype=np.uint8)
    copy_out(source, data.ctypes.data, nbytes)
    return data.data.cast("B")


def content_digests(table: PieceTable, rank: int, live: Sequence[Live]) -> dict[str, int]:
    """crc32 of each chunk that this rank and others hold, by key: the proof that replicas are equal."""
    held = by_name(live)
    several = [piece for piece in table.pieces if piece.holders >> rank & 1 and piece.holders != 1 << rank]
    shared = [table.chunks[index] for piece in several for index in piece.chunk_ids]
    return {chunk.key: zlib.crc32(bytes_of(box(chunk, held))) for chunk in shared}
