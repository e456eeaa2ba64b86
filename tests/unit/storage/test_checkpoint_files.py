"""Checkpoints on a store: write, commit, read, verify; crashes, races, faults and damage."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastwords.protocol import codec, manifest, snapshots, tensorfile
from lastwords.protocol.manifest import IncompleteError
from lastwords.storage import checkpoints, streams
from lastwords.storage.checkpoints import CheckpointError, ClaimedError, JobCheckpoints
from lastwords.storage.posix import PosixStore
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


# --- O-12, O-13: crashes ----------------------------------------------------------------------------


class Stopped(BaseException):
    """The writer was stopped here."""


def steps_of_a_save(folder: pathlib.Path, *, links: bool) -> int:
    count = 0
    support.save(support.at(folder), step=10)

    def on_step(_: str) -> None:
        nonlocal count
        count += 1

    store = PosixStore(folder, on_step)
    store._links = links
    support.save(JobCheckpoints(store, "ns", "job"), step=20)
    return count


@pytest.mark.parametrize("links", [True, False])
def test_O_12_O_13_a_writer_stopped_after_any_write_fsync_or_link_leaves_the_previous_or_the_new_one(
    tmp_path: pathlib.Path, links: bool
) -> None:
    total = steps_of_a_save(tmp_path / "count", links=links)
    assert total > 20
    new = 0
    for stop_at in range(1, total + 1):
        folder = tmp_path / str(stop_at)
        support.save(support.at(folder), step=10)
        left = stop_at

        def on_step(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Stopped

        store = PosixStore(folder, on_step)
        store._links = links
        with contextlib.suppress(Stopped):
            support.save(JobCheckpoints(store, "ns", "job"), step=20)
        job = support.at(folder)
        good = [info.id.step for info in job.list_checkpoints() if not info.rejected]
        assert good in ([10], [10, 20]), f"stopped after step {stop_at}"
        for step in good:
            assert job.verify(support.identify(step)) == []
        new += good == [10, 20]
        # Whoever comes next finishes it, or a newer one, and cleans up.
        again = PosixStore(folder)
        again._links = links
        next_job = JobCheckpoints(again, "ns", "job")
        support.save(next_job, step=20)
        assert next_job.verify(support.identify(20)) == []
    assert 0 < new < total


WRITER = """
import os, signal, sys
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.posix import PosixStore
from tests.unit.storage import support
left = int(sys.argv[2])
def on_step(name):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
support.save(JobCheckpoints(PosixStore(sys.argv[1], on_step), "ns", "job"), step=20)
"""


@pytest.mark.slow
def test_O_12_a_writer_killed_with_SIGKILL_leaves_whole_checkpoints_only(tmp_path: pathlib.Path) -> None:
    total = steps_of_a_save(tmp_path / "count", links=True)
    for stop_at in range(1, total + 1, 3):
        folder = tmp_path / str(stop_at)
        support.save(support.at(folder), step=10)
        done = subprocess.run([sys.executable, "-c", WRITER, str(folder), str(stop_at)], check=False)
        assert done.returncode == -signal.SIGKILL
        job = support.at(folder)
        good = [info.id.step for info in job.list_checkpoints() if not info.rejected]
        assert good in ([10], [10, 20])
        assert all(job.verify(support.identify(step)) == [] for step in good)


COMMITTER = """
import sys
from tests.unit.storage import support
job = support.at(sys.argv[1])
plan = support.plan()
print("ready", flush=True)
sys.stdin.readline()
made = job.commit(plan)
print(made.id.folder, flush=True)
"""


def test_committers_in_several_processes_race_and_all_agree(tmp_path: pathlib.Path) -> None:
    job, made = support.at(tmp_path), support.plan()
    support.write(job, made)
    committers = [
        subprocess.Popen([sys.executable, "-c", COMMITTER, str(tmp_path)], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]  # fmt: skip
    for committer in committers:
        assert committer.stdout is not None
        assert committer.stdout.readline() == "ready\n"
    for committer in committers:
        assert committer.stdin is not None
        committer.stdin.write("go\n")
        committer.stdin.flush()
    for committer in committers:
        output, _ = committer.communicate(timeout=30)
        assert committer.returncode == 0
        assert output == support.identify(10).folder + "\n"
    assert job.verify(support.identify(10)) == []


# --- damage -----------------------------------------------------------------------------------------


def all_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "ns/job" / support.identify(10).folder).iterdir())


def test_O_12_every_flipped_byte_is_noticed(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    made = support.save(job)
    flipped = 0
    for path in all_files(tmp_path):
        data = path.read_bytes()
        for position in range(0, len(data), 1 if len(data) < 500 else 37):
            path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
            assert job.verify(made.id) != [], f"byte {position} of {path.name}"
            flipped += 1
        path.write_bytes(data)
    assert flipped > 300
    assert job.verify(made.id) == []


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


def test_O_12_a_short_or_missing_file_is_seen_without_reading_and_the_older_one_stays(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    support.save(job, step=5)
    made = support.save(job)
    data = next(path for path in all_files(tmp_path) if path.suffix == ".safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    infos = {info.id.step: info.rejected for info in job.list_checkpoints()}
    assert infos[5] == ""
    assert data.name in infos[10]
    data.unlink()
    assert "missing" in {info.id.step: info.rejected for info in job.list_checkpoints()}[10]
    (tmp_path / "ns/job" / made.id.folder / manifest.MANIFEST).write_bytes(b"{}")
    assert "torn" in {info.id.step: info.rejected for info in job.list_checkpoints()}[10]


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
    job.retain(1, ())
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
