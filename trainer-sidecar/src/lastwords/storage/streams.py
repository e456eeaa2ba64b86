"""What goes into a tensor file: ranges of memory or of files, handed on in small pieces and summed on the way."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from lastwords.protocol.snapshots import BLOCK_BYTES

_PIECE_BYTES = 1024 * 1024
"""Bytes that are summed and written at a time: still in the processor's cache when they are written."""

Source = tuple[memoryview | int, int, int]
"""Bytes `begin` to `end` of a memoryview or of an open file (its descriptor)."""


class CancelledError(ValueError):
    """The write was given up, or a source has become shorter."""


def whole(data: bytes | memoryview) -> Source:
    """All of `data`."""
    return memoryview(data), 0, len(data)


def coalesce(sources: Iterable[Source]) -> list[Source]:
    """Ranges that follow each other in the same place become one."""
    merged: list[Source] = []
    for place, begin, end in sources:
        if merged and merged[-1][0] is place and merged[-1][2] == begin:
            merged[-1] = (place, merged[-1][1], end)
        else:
            merged.append((place, begin, end))
    return merged


def summed(sources: Sequence[Source], sums: list[int], cancelled: Callable[[], bool]) -> Iterator[memoryview]:
    """
    Hand on all bytes in pieces, each valid until the next is asked for; appends the crc32 of each block to `sums`.

    Raises CancelledError.
    """
    buffer = memoryview(bytearray(_PIECE_BYTES))
    value, room = 0, BLOCK_BYTES
    for place, begin, end in sources:
        while begin < end:
            if cancelled():
                raise CancelledError("the save was given up")
            count = min(_PIECE_BYTES, room, end - begin)
            piece = _take(place, begin, count, buffer)
            value = zlib.crc32(piece, value)
            begin += count
            room -= count
            if room == 0:
                sums.append(value)
                value, room = 0, BLOCK_BYTES
            yield piece
    if room < BLOCK_BYTES:
        sums.append(value)


def _take(place: memoryview | int, begin: int, count: int, buffer: memoryview) -> memoryview:
    if not isinstance(place, int):
        return place[begin : begin + count]
    done = 0
    while done < count:
        # Read, not mapped: a file that is cut short meanwhile must be an error and not a SIGBUS.
        got = os.preadv(place, [buffer[done:count]], begin + done)
        if got == 0:
            raise CancelledError("the snapshot has become shorter while it was read")
        done += got
    return buffer[:count]
