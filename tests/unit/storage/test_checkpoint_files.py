"""Checkpoints on a store: write, commit, read, verify; crashes, races, faults and damage."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastwords.protocol import codec, manifest, snapshots, tensorfile
from lastwords.protocol.manifest import IncompleteError
from lastwords.storage import checkpoints, streams
from lastwords.storage.checkpoints import CheckpointError, ClaimedError
from lastwords.storage.retention import Keep
from tests.unit.storage import support
from tests.unit.storage.conftest import Fresh


def test_a_checkpoint_is_whole_readable_and_described(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    made = support.save(job)
    assert job.read_manifest(made.id) == made
    assert job.verify(made.id) == []
    info = job.describe(made.id)
    assert info is not None
    assert (info.id, info.kind, info.rejected, info.finite) == (support.identify(10), "periodic", "", True)
    part = next(part for part in made.parts if part.data is not None)
    assert part.data is not None
    with open(job.location(made.id, part.data.name), "rb") as file:
        data = file.read()
    entries, _ = tensorfile.parse_header(data, len(data))
    by_key = {chunk.key: index for index, chunk in enumerate(made.plan.chunks)}
    wanted = support.sources(made.plan)
    for entry in entries:
        source = wanted[by_key[entry.name]][0]
        assert isinstance(source, memoryview)
        assert data[entry.begin : entry.end] == bytes(source)
    assert snapshots.block_checksums(data) == part.data.blocks
    record = made.parts[0].record
    assert record is not None
    assert job.read_file(made.id, record) == b"record of 0 at 10"


def test_parts_may_come_from_files_and_adjacent_ranges_become_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3_000_000))
    file = os.open(path, os.O_RDONLY)
    try:
        content = streams.coalesce([(file, 10, 20), (file, 20, 2_500_000), (file, 2_600_000, 2_600_001)])
        assert content == [(file, 10, 2_500_000), (file, 2_600_000, 2_600_001)]
        sums: list[int] = []
        got = b"".join(map(bytes, streams.summed(content, sums, lambda: False)))
        data = path.read_bytes()
        assert got == data[10:2_500_000] + data[2_600_000:2_600_001]
        assert tuple(sums) == snapshots.block_checksums(got)
        os.truncate(path, 100)
        with pytest.raises(streams.CancelledError, match="shorter"):
            list(streams.summed(content, sums, lambda: False))
    finally:
        os.close(file)


@given(st.lists(st.integers(0, 3 * snapshots.BLOCK_BYTES // 2), max_size=4))
@settings(max_examples=15, deadline=None)
def test_checksums_are_those_of_the_blocks_however_the_ranges_lie(sizes: list[int]) -> None:
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    sources, begin = [], 0
    for size in sizes:
        sources.append((memoryview(data), begin, begin + size))
        begin += size
    sums: list[int] = []
    got = b"".join(map(bytes, streams.summed(sources, sums, lambda: False)))
    assert got == data[:begin]
    assert tuple(sums) == snapshots.block_checksums(got)


def test_another_job_of_the_same_name_is_refused_with_a_sentence(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    job.claim("first")
    job.claim("first")
    with pytest.raises(ClaimedError, match="another job of the same name.*another storage folder"):
        job.claim("second")
    (tmp_path / "ns/job/job.json").write_bytes(b"{torn")
    with pytest.raises(ClaimedError, match="cannot be read"):
        job.claim("first")


def test_the_plan_that_is_there_rules(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    first = job.write_plan(support.plan())
    assert job.write_plan(support.plan(kind="final")) == first
    other = dataclasses.replace(support.plan(), chunks=support.plan().chunks[:2])
    with pytest.raises(CheckpointError, match="another state"):
        job.write_plan(other)


def test_a_commit_needs_every_part_and_names_what_is_missing(tmp_path: pathlib.Path) -> None:
    job, made = support.at(tmp_path), support.plan()
    support.write(job, made, ranks=(0,))
    with pytest.raises(IncompleteError, match=r"ranks \[1\]"):
        job.commit(made)
    assert job.list_checkpoints() == []
    support.write(job, made, ranks=(1,))
    assert job.commit(made) == job.commit(made)


# --- damage -----------------------------------------------------------------------------------------


def all_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "ns/job" / support.identify(10).folder).iterdir())


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_O_12_any_change_of_any_file_is_noticed(data: st.DataObject, fresh: Fresh) -> None:
    folder = fresh.folder()
    job = support.at(folder)
    made = support.save(job)
    path = data.draw(st.sampled_from(all_files(folder)))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "add", "empty", "remove", "swap"]))
    if change == "flip":
        mask = data.draw(st.integers(1, 255))
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
    elif change == "cut":
        path.write_bytes(content[:position])
    elif change == "add":
        path.write_bytes(content + b"\0")
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "remove":
        path.unlink()
    else:
        other = data.draw(st.sampled_from([p for p in all_files(folder) if p.read_bytes() != content]))
        path.write_bytes(other.read_bytes())
    assert job.verify(made.id) != []


def test_O_12_a_checkpoint_marked_as_damaged_is_rejected_by_everyone(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    made = support.save(job)
    job.reject(made.id, "block 3 is damaged")
    job.reject(made.id, "again")
    assert [info.rejected for info in support.at(tmp_path).list_checkpoints()] == ["block 3 is damaged"]
    job.delete(made.id)
    assert job.list_folders() == []


def test_folders_that_only_look_like_ours_are_left_alone(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    support.save(job)
    for name in ("step-10-old", "step-000000000099-a1.bak", "notes"):
        (tmp_path / "ns/job" / name).mkdir()
    assert job.list_folders() == [support.identify(10)]
    job.retain(Keep(last=1), ())
    assert (tmp_path / "ns/job/notes").is_dir()


def test_O_45_nothing_that_a_checkpoint_holds_is_run(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    made = support.save(job)
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR."
    for path in all_files(tmp_path):
        content = path.read_bytes()
        path.write_bytes(evil)
        job.list_checkpoints()
        assert job.verify(made.id) != []
        path.write_bytes(content)
    assert not (tmp_path / "pwned").exists()
    sources = pathlib.Path(checkpoints.__file__).parents[1]
    for path in [*(sources / "storage").glob("*.py"), *(sources / "agent").glob("*.py")]:
        assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|torch)", path.read_text(), re.MULTILINE), path


def test_numbers_in_files_are_checked(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    made = support.save(job)
    changed = dataclasses.replace(made, parts=made.parts[:1])
    path = tmp_path / "ns/job" / made.id.folder / manifest.MANIFEST
    path.write_bytes(manifest.encode_manifest(changed))
    assert "expected" in job.list_checkpoints()[0].rejected
    moved = dataclasses.replace(made, plan=dataclasses.replace(made.plan, step=11))
    parts = tuple(dataclasses.replace(part, step=11) for part in moved.parts)
    path.write_bytes(manifest.encode_manifest(dataclasses.replace(moved, parts=parts)))
    assert "is of" in job.list_checkpoints()[0].rejected
    assert codec.dumps(made) != codec.dumps(changed)
