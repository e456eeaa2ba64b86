"""
The safetensors format: 8 bytes header length, JSON header, data. Any safetensors reader opens what we write.

The header is padded with spaces so that the data starts at a multiple of 4096. Tensors stand in the order
given; the caller puts wide items first so that each stays aligned.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000

#: torch dtype name (without "torch.") to (safetensors name, bytes per item)
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
NAMES = {short: name for name, (short, _) in DTYPES.items()}


class TensorFileError(ValueError):
    """Not a whole safetensors file; the text says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor in a file. `begin` and `end` are byte offsets from the start of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def item_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype name; KeyError when the format has no such type."""
    return DTYPES[dtype][1]


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, tuple[Entry, ...]]:
    """
    Lay out tensors (name, torch dtype name, shape) in the order given.

    Returns the bytes before the data (length word, JSON, padding) and the entries with file offsets.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    offset = 0
    rows = []
    for name, dtype, shape in tensors:
        short, size = DTYPES[dtype]
        count = size * math.prod(shape)
        header[name] = {"dtype": short, "shape": list(shape), "data_offsets": [offset, offset + count]}
        rows.append((name, dtype, tuple(shape), offset, offset + count))
        offset += count
    text = json.dumps(header, separators=(",", ":")).encode()
    total = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    text = text + b" " * (total - 8 - len(text))
    entries = tuple(Entry(n, d, s, total + b, total + e) for n, d, s, b, e in rows)
    return struct.pack("<Q", len(text)) + text, entries


def parse_header(head: bytes, file_bytes: int) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """
    Entries and metadata from the first bytes of a file (at least length word plus header).

    Raises TensorFileError for a short file, offsets outside it, holes, overlaps or a size that is not the shape's.
    """
    if len(head) < 8:
        raise TensorFileError("shorter than the length word")
    (length,) = struct.unpack("<Q", head[:8])
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise TensorFileError(f"header of {length} bytes does not fit into a file of {file_bytes} bytes")
    if len(head) < 8 + length:
        raise TensorFileError(f"only {len(head)} of {8 + length} header bytes given")
    try:
        header = json.loads(head[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        rows = sorted(
            ((name, NAMES[row["dtype"]], tuple(row["shape"]), *row["data_offsets"]) for name, row in header.items()),
            key=lambda row: (row[3], row[4]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"header is not a safetensors header: {error!r}") from None
    base = 8 + length
    position = 0
    for name, dtype, shape, begin, end in rows:
        if begin != position or end - begin != item_bytes(dtype) * math.prod(shape):
            raise TensorFileError(f"offsets of {name!r} do not fit its shape or its neighbours")
        position = end
    if base + position > file_bytes:
        raise TensorFileError(f"data ends at {base + position}, the file at {file_bytes}")
    return tuple(Entry(n, d, s, base + b, base + e) for n, d, s, b, e in rows), metadata


def header_bytes(first_eight: bytes) -> int:
    """How many bytes of the file `parse_header` needs, from its first eight."""
    if len(first_eight) < 8:
        raise TensorFileError("shorter than the length word")
    length = int(struct.unpack("<Q", first_eight)[0])
    if length > MAX_HEADER_BYTES:
        raise TensorFileError(f"header length {length} is absurd")
    return 8 + length
