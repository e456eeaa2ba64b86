"""
Files of a checkpoint. The manifest is the commit marker: written last, create-only, a pure function of the parts.

    <storage>/<namespace>/<job>/
        job.json                     Claim
        step-000000012000-a3/
            plan.json                CheckpointPlan, create-only
            rank-00000.safetensors   chunks
            rank-00000.json          PartRecord
            record-00000.safetensors small record of rank 0 (RNG, loader position, buffers)
            manifest.json            Manifest
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterable

from lastwords.protocol import codec
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.pieces import Topology
from lastwords.protocol.snapshots import CHECKSUM_ALGORITHM

FORMAT = 1
CLAIM = "job.json"
PLAN = "plan.json"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class CheckpointId:
    """One checkpoint: a step of an attempt. Never reused; orders by step, then attempt, as numbers."""

    step: int
    attempt: int

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"step-{self.step:012d}-a{self.attempt}"


def parse_folder(name: str) -> CheckpointId | None:
    """The id of a folder, or None when the name is not one of ours (`step-10-old` is not)."""
    found = re.fullmatch(r"step-(\d{12,})-a(\d+)", name)
    return CheckpointId(step=int(found[1]), attempt=int(found[2])) if found else None


def part_data(rank: int) -> str:
    """Data file of a writer."""
    return f"rank-{rank:05d}.safetensors"


def part_record(rank: int) -> str:
    """Record file of a writer."""
    return f"rank-{rank:05d}.json"


def rank_record(rank: int) -> str:
    """Small record of a rank."""
    return f"record-{rank:05d}.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """Who owns a checkpoint folder."""

    uid: str
    name: str
    format: int = FORMAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Who writes what. `writers` by rank (of the part); `kind` is periodic, last-words, final or requested."""

    step: int
    attempt: int
    kind: str
    lineage: tuple[LineageEntry, ...]
    topology: Topology
    generation: int
    chunks: tuple[Chunk, ...]
    writers: dict[int, tuple[int, ...]]
    record_ranks: tuple[int, ...]
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """Chunk id (into the plan's list) and its byte range in the file."""

    chunk_id: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file with its length and the checksum of each 8 MiB block."""

    name: str
    nbytes: int
    blocks: tuple[int, ...]
    algorithm: str = CHECKSUM_ALGORITHM


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartRecord:
    """What one writer wrote. `data` None: this rank wrote no chunk. `record`: its small record, if it had one."""

    rank: int
    step: int
    attempt: int
    data: StoredFile | None
    chunks: tuple[StoredChunk, ...]
    record: StoredFile | None
    finite: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything needed to restore: a copy of the plan and of all part records."""

    plan: CheckpointPlan
    parts: tuple[PartRecord, ...]
    format: int = FORMAT

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint this is."""
        return CheckpointId(step=self.plan.step, attempt=self.plan.attempt)

    @property
    def finite(self) -> bool:
        """False when a tensor held NaN or infinity: no candidate for restore by default."""
        return all(part.finite for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(part.data.nbytes for part in self.parts if part.data)


class IncompleteError(ValueError):
    """The parts do not cover the plan; the text says what is missing."""


def build_manifest(plan: CheckpointPlan, parts: Iterable[PartRecord]) -> Manifest:
    """
    The manifest, after proof that every chunk of the plan is in exactly the file of its writer.

    Raises IncompleteError with what is missing or does not fit.
    """
    by_rank = {part.rank: part for part in parts}
    expected = set(plan.writers) | set(plan.record_ranks)
    if set(by_rank) != expected:
        raise IncompleteError(f"parts of ranks {sorted(by_rank)}, expected {sorted(expected)}")
    written: list[int] = []
    for rank, part in sorted(by_rank.items()):
        if (part.step, part.attempt) != (plan.step, plan.attempt):
            raise IncompleteError(f"part of rank {rank} is of step {part.step}, attempt {part.attempt}")
        ids = tuple(sorted(stored.chunk_id for stored in part.chunks))
        if ids != tuple(sorted(plan.writers.get(rank, ()))):
            raise IncompleteError(f"part of rank {rank} does not hold the chunks it was to write")
        for stored in part.chunks:
            if part.data is None or stored.end > part.data.nbytes:
                raise IncompleteError(f"part of rank {rank} is shorter than its chunks")
            if stored.end - stored.begin != plan.chunks[stored.chunk_id].nbytes:
                raise IncompleteError(f"{plan.chunks[stored.chunk_id].key!r} has the wrong size")
        if rank in plan.record_ranks and part.record is None:
            raise IncompleteError(f"the small record of rank {rank} is missing")
        written.extend(ids)
    if sorted(written) != list(range(len(plan.chunks))):
        absent = sorted(set(range(len(plan.chunks))) - set(written))
        raise IncompleteError(f"not covered: {[plan.chunks[i].key for i in absent[:5]]} ({len(absent)} chunks)")
    return Manifest(plan=plan, parts=tuple(by_rank[rank] for rank in sorted(by_rank)))


def encode_manifest(manifest: Manifest) -> bytes:
    """Bytes of the file: one line of JSON and one line with its checksum, so that a torn file is recognised."""
    body = codec.dumps(manifest)
    return body + b"\n" + f"crc32 {zlib.crc32(body):08x}\n".encode()


def decode_manifest(data: bytes) -> Manifest:
    """Raises DecodeError for anything that is not a whole manifest of a known format."""
    body, _, tail = data.partition(b"\n")
    if tail != f"crc32 {zlib.crc32(body):08x}\n".encode():
        raise codec.DecodeError("manifest: torn or changed (checksum)")
    manifest = codec.loads(Manifest, body, "manifest")
    if manifest.format != FORMAT:
        raise codec.DecodeError(f"manifest: format {manifest.format}, this version reads {FORMAT}")
    return manifest
