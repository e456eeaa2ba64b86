"""
A small value in shared memory that survives its writer: either whole, or recognised as torn.

Layout of an area of `capacity` bytes: sequence u64, length u64, crc32 u64, zero u64, then the body.
The sequence is odd while a write is going on. An eight-byte store through `memoryview.cast("Q")` is one
store on x86-64; on machines with weaker ordering the checksum catches what the sequence misses.
Both are needed: the sequence alone misses reordering, the checksum alone misses a body that is still
changing consistently.
"""

from __future__ import annotations

import zlib

HEADER_BYTES = 32


class AreaFullError(ValueError):
    """The body is larger than the area; both sizes are in the text."""


def invalidate(area: memoryview) -> None:
    """Mark the area as being written; every reader refuses it until `commit`."""
    words = area[:HEADER_BYTES].cast("Q")
    words[0] = words[0] | 1


def revalidate(area: memoryview) -> None:
    """Take back an `invalidate` whose body was not touched."""
    words = area[:HEADER_BYTES].cast("Q")
    words[0] = (words[0] | 1) + 1


def commit(area: memoryview, body: bytes) -> None:
    """Write `body` and make the area valid."""
    if len(body) > len(area) - HEADER_BYTES:
        raise AreaFullError(f"{len(body)} bytes do not fit into an area of {len(area) - HEADER_BYTES} bytes")
    words = area[:HEADER_BYTES].cast("Q")
    words[0] = words[0] | 1
    area[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    words[1] = len(body)
    words[2] = zlib.crc32(body)
    words[0] = words[0] + 1


def sequence(area: memoryview) -> int:
    """The write counter: a reader that sees the same even value before and after copied a quiet area."""
    return int(area[:HEADER_BYTES].cast("Q")[0])


def read(area: memoryview) -> bytes | None:
    """The committed body, or None when the area is empty, torn or being written."""
    if len(area) < HEADER_BYTES:
        return None
    words = area[:HEADER_BYTES].cast("Q")
    before = words[0]
    length = words[1]
    if before == 0 or before & 1 or length > len(area) - HEADER_BYTES:
        return None
    body = bytes(area[HEADER_BYTES : HEADER_BYTES + length])
    if words[0] != before or zlib.crc32(body) != words[2]:
        return None
    return body
