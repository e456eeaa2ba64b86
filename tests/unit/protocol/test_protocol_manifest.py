"""Plan, parts, manifest: the commit marker proves coverage and shows every change of a byte."""

from __future__ import annotations

import dataclasses

import pytest

from lastwords.protocol import chunks, codec, manifest, pieces
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import PartRecord, StoredChunk, StoredFile

TOPOLOGY = pieces.Topology(workers=1, processes_per_worker=2)
CHUNKS = (chunks.whole("a", "float32", (4,)), chunks.whole("b", "float32", (2,)))
PLAN = manifest.CheckpointPlan(
    step=12,
    attempt=3,
    kind="periodic",
    lineage=(LineageEntry(3, 0, 0),),
    topology=TOPOLOGY,
    generation=1,
    chunks=CHUNKS,
    writers={0: (0,), 1: (1,)},
    record_ranks=(0, 1),
)


def part(rank: int, size: int) -> PartRecord:
    return PartRecord(
        rank=rank,
        step=12,
        attempt=3,
        data=StoredFile(name=manifest.part_data(rank), nbytes=4096 + size, blocks=(1,)),
        chunks=(StoredChunk(rank, 4096, 4096 + size),),
        record=StoredFile(name=manifest.rank_record(rank), nbytes=10, blocks=(2,)),
    )


PARTS = (part(0, 16), part(1, 8))


def test_the_manifest_is_a_pure_function_of_the_parts() -> None:
    first = manifest.encode_manifest(manifest.build_manifest(PLAN, PARTS))
    second = manifest.encode_manifest(manifest.build_manifest(PLAN, PARTS[::-1]))
    assert first == second
    assert manifest.decode_manifest(first).id == manifest.CheckpointId(step=12, attempt=3)


def test_every_flipped_byte_of_a_manifest_is_noticed() -> None:
    data = manifest.encode_manifest(manifest.build_manifest(PLAN, PARTS))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x20
        with pytest.raises(codec.DecodeError):
            manifest.decode_manifest(bytes(changed))


def test_every_truncation_of_a_manifest_is_noticed() -> None:
    data = manifest.encode_manifest(manifest.build_manifest(PLAN, PARTS))
    for length in range(len(data)):
        with pytest.raises(codec.DecodeError):
            manifest.decode_manifest(data[:length])


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (PARTS[:1], r"parts of ranks \[0\], expected \[0, 1\]"),
        ((PARTS[0], dataclasses.replace(PARTS[1], step=11)), "part of rank 1 is of step 11"),
        ((PARTS[0], dataclasses.replace(PARTS[1], chunks=())), "does not hold the chunks it was to write"),
        ((PARTS[0], part(1, 4)), "'b' has the wrong size"),
        ((PARTS[0], dataclasses.replace(PARTS[1], data=None)), "shorter than its chunks"),
        ((PARTS[0], dataclasses.replace(PARTS[1], record=None)), "small record of rank 1 is missing"),
    ],
)
def test_parts_that_do_not_make_a_checkpoint_are_refused(parts: tuple[PartRecord, ...], sentence: str) -> None:
    with pytest.raises(manifest.IncompleteError, match=sentence):
        manifest.build_manifest(PLAN, parts)


def test_a_chunk_that_nobody_was_to_write_is_refused() -> None:
    plan = dataclasses.replace(PLAN, writers={0: (0,), 1: ()})
    parts = (PARTS[0], dataclasses.replace(PARTS[1], data=None, chunks=()))
    with pytest.raises(manifest.IncompleteError, match=r"not covered: \['b'\]"):
        manifest.build_manifest(plan, parts)


@pytest.mark.parametrize("name", ["step-10-old", "step-000000000010-a1-old", "step-10-a1", "xstep-000000000010-a1"])
def test_a_folder_that_only_looks_like_a_checkpoint_is_none(name: str) -> None:
    assert manifest.parse_folder(name) is None


def test_ids_order_as_numbers_not_as_text() -> None:
    ids = [manifest.CheckpointId(step=s, attempt=a) for s, a in [(10_000, 1), (9_900, 10), (9_900, 9)]]
    assert [i.folder for i in sorted(ids)] == [
        "step-000000009900-a9",
        "step-000000009900-a10",
        "step-000000010000-a1",
    ]
    assert all(manifest.parse_folder(i.folder) == i for i in ids)
