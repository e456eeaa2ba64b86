"""Chunks (name, global offsets, sizes): the unit of state, and the geometry of their boxes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from lastwords.protocol import tensorfile


class LayoutError(ValueError):
    """What the ranks hold does not fit together; the text names the tensor and the ranks."""


@dataclasses.dataclass(frozen=True, order=True)
class Chunk:
    """
    One box of one tensor. `name` is the fully qualified, globally unique name; `shape` the shape of the
    whole tensor; the box is `offsets` + `sizes` in elements. Scalars have empty tuples.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return tensorfile.item_bytes(self.dtype) * math.prod(self.sizes)

    @property
    def key(self) -> str:
        """Name of the chunk in a tensor file: the tensor's own name when the box is the whole tensor."""
        if self.sizes == self.shape:
            return self.name
        ranges = ",".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{ranges}]"


def whole(name: str, dtype: str, shape: Sequence[int]) -> Chunk:
    """The chunk that is a whole tensor."""
    return Chunk(name, (0,) * len(shape), tuple(shape), tuple(shape), dtype)


def overlap(first: Chunk, second: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Intersection of two boxes of the same tensor as (offsets, sizes), or None when they do not meet."""
    offsets, sizes = [], []
    for o1, s1, o2, s2 in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True):
        begin, end = max(o1, o2), min(o1 + s1, o2 + s2)
        if begin >= end:
            return None
        offsets.append(begin)
        sizes.append(end - begin)
    return tuple(offsets), tuple(sizes)


def split(chunk: Chunk, cuts: Sequence[Sequence[int]]) -> list[Chunk]:
    """Cut the box at the given global coordinates, one sorted list per dimension."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for offset, size, marks in zip(chunk.offsets, chunk.sizes, cuts, strict=True):
        edges = [offset, *(m for m in marks if offset < m < offset + size), offset + size]
        spans = [(a, b - a) for a, b in itertools.pairwise(edges)]
        boxes = [((*o, a), (*s, n)) for o, s in boxes for a, n in spans]
    return [dataclasses.replace(chunk, offsets=o, sizes=s) for o, s in boxes]


def check_names(layouts: Mapping[int, Sequence[Chunk]]) -> None:
    """Refuse a name with two shapes or dtypes, and a box outside its tensor. `layouts` is by rank."""
    seen: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for rank, layout in layouts.items():
        for chunk in layout:
            known = seen.setdefault(chunk.name, (chunk.shape, chunk.dtype, rank))
            if known[:2] != (chunk.shape, chunk.dtype):
                raise LayoutError(
                    f"{chunk.name!r} means two things: {known[1]}{list(known[0])} on rank {known[2]}, "
                    f"{chunk.dtype}{list(chunk.shape)} on rank {rank}. Give each tensor a globally unique name"
                )
            ends = zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
            if any(o < 0 or s <= 0 or o + s > n for o, s, n in ends):
                raise LayoutError(f"{chunk.key!r} on rank {rank} lies outside of its tensor {list(chunk.shape)}")


def check_complete(chunks: Iterable[Chunk]) -> None:
    """
    Refuse a tensor of which no rank holds some elements. `chunks`: equal or disjoint boxes, each once.

    Whoever describes its shard with a wrong box leaves such a gap where the right one would have been.
    """
    held: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        held.setdefault(chunk.name, []).append(chunk)
    for name, boxes in held.items():
        have, shape = sum(math.prod(box.sizes) for box in boxes), boxes[0].shape
        if have != math.prod(shape):
            raise LayoutError(
                f"{name!r} is {list(shape)}, which is {math.prod(shape)} elements, but all ranks together hold {have}: "
                "nothing could be restored from that. Shards must follow each other without a gap; where a dimension "
                "is cut twice (fully_shard on a tensor-parallel module), make it divisible by the product of both cuts"
            )


def atomise(chunks: Iterable[Chunk], max_bytes: int | None = None) -> dict[Chunk, tuple[Chunk, ...]]:
    """
    Split chunks so that any two boxes of one tensor are equal or disjoint; large ones also along dimension 0.

    Returns each given chunk with the pieces it becomes. Coverage by sets of holders is only right after this.
    """
    by_name: dict[str, set[Chunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.name, set()).add(chunk)
    result: dict[Chunk, tuple[Chunk, ...]] = {}
    for group in by_name.values():
        dims = len(next(iter(group)).shape)
        cuts: list[set[int]] = [set() for _ in range(dims)]
        if len(group) > 1:
            for chunk in group:
                for dim in range(dims):
                    cuts[dim] |= {chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]}
        if max_bytes is not None and dims:
            for chunk in group:
                cuts[0] |= set(_row_cuts(chunk, max_bytes))
        marks = [sorted(marks) for marks in cuts]
        for chunk in group:
            result[chunk] = tuple(split(chunk, marks)) if dims else (chunk,)
    return result


def _row_cuts(chunk: Chunk, max_bytes: int) -> range:
    rows = chunk.sizes[0]
    parts = min(rows, -(-chunk.nbytes // max_bytes))
    if parts <= 1:
        return range(0)
    step = -(-rows // parts)
    return range(chunk.offsets[0] + step, chunk.offsets[0] + rows, step)
