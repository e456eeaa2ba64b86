"""
The commit on a folder, with and without links, and on a real S3 server: whoever stops, races or reads, there is the
previous checkpoint or the new one, whole.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from lastwords.protocol.manifest import CheckpointId
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints
from lastwords.storage.retention import Keep
from tests.unit.storage import support
from tests.unit.storage.support import Place


class Stopped(BaseException):
    """The writer was stopped here."""


def steps_of_a_save(place: Place) -> int:
    count = 0
    support.save(place.job(), step=10)

    def on_step(_: str) -> None:
        nonlocal count
        count += 1

    support.save(place.job(on_step), step=20)
    return count


@pytest.mark.slow
def test_O_12_O_13_a_writer_stopped_after_any_write_fsync_link_or_put_leaves_the_previous_or_the_new_one(
    place: Place,
) -> None:
    total = steps_of_a_save(place.under("count"))
    assert total > 15
    new = 0
    for stop_at in range(1, total + 1):
        here = place.under(str(stop_at))
        support.save(here.job(), step=10)
        left = stop_at

        def on_step(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Stopped

        with contextlib.suppress(Stopped):
            support.save(here.job(on_step), step=20)
        job = here.job()
        good = [info.id.step for info in job.list_checkpoints() if not info.rejected]
        assert good in ([10], [10, 20]), f"stopped after step {stop_at}"
        for step in good:
            assert job.verify(support.identify(step)) == []
        new += good == [10, 20]
        # Whoever comes next finishes it, or a newer one, and cleans up.
        support.save(job, step=20)
        assert job.verify(support.identify(20)) == []
    assert 0 < new < total


WRITER = """
import os, signal, sys
from tests.unit.storage import support
left = int(sys.argv[3])
def on_step(name):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
support.save(support.Place(sys.argv[1], sys.argv[2]).job(on_step), step=20)
"""


@pytest.mark.slow
def test_O_12_a_writer_killed_with_SIGKILL_leaves_whole_checkpoints_only(place: Place) -> None:
    total = steps_of_a_save(place.under("count"))
    for stop_at in range(1, total + 1, 4):
        here = place.under(str(stop_at))
        support.save(here.job(), step=10)
        done = subprocess.run([sys.executable, "-c", WRITER, here.root, here.kind, str(stop_at)], check=False)
        assert done.returncode == -signal.SIGKILL
        job = here.job()
        good = [info.id.step for info in job.list_checkpoints() if not info.rejected]
        assert good in ([10], [10, 20])
        assert all(job.verify(support.identify(step)) == [] for step in good)


COMMITTER = """
import sys
from tests.unit.storage import support
job = support.Place(sys.argv[1], sys.argv[2]).job()
plan = support.plan()
print("ready", flush=True)
sys.stdin.readline()
made = job.commit(plan)
print(made.id.folder, flush=True)
"""


@pytest.mark.slow
def test_committers_in_several_processes_race_and_all_agree(place: Place) -> None:
    job, made = place.job(), support.plan()
    support.write(job, made)
    committers = [
        subprocess.Popen([sys.executable, "-c", COMMITTER, place.root, place.kind], stdin=subprocess.PIPE,
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


def test_whole_saves_of_the_same_step_race_and_all_agree(place: Place) -> None:
    start = threading.Barrier(3)
    made, failed = [], []

    def race() -> None:
        try:
            start.wait()
            made.append(support.save(place.job()))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert made == [made[0]] * 3
    assert place.job().verify(support.identify(10)) == []


def usable(job: JobCheckpoints) -> list[CheckpointId]:
    return [info.id for info in job.list_checkpoints() if not info.rejected]


def test_a_reader_finds_only_whole_checkpoints_while_they_are_written_and_removed(place: Place) -> None:
    support.save(place.job(), step=1)
    over = threading.Event()
    problems: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        job = place.job()
        while not over.is_set():
            # What a list names may be removed before it is looked at, but not time and again.
            good = next(filter(None, (usable(job) for _ in range(3))), [])
            if not good:
                problems.append("no checkpoint at all")
            elif (found := job.verify(good[-1])) and job.read_manifest(good[-1]) is not None:
                # It was not being removed, which begins with the manifest.
                problems.extend(found)
            seen.update(one.step for one in good)

    reader = threading.Thread(target=read)
    reader.start()
    writer = place.job()
    for step in range(2, 8):
        support.save(writer, step=step)
        writer.retain(Keep(last=2), ())
    over.set()
    reader.join()
    assert problems == []
    assert len(seen) > 1


def test_O_12_every_flipped_byte_is_noticed(place: Place) -> None:
    job = place.job()
    made = support.save(job)
    store, flipped = place.store(), 0
    stride = 101 if place.kind == "s3" else 1
    for path, data in place.files().items():
        for position in range(0, len(data), stride if len(data) < 500 else 37 * stride):
            changed = data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]
            store.write(path, [changed], len(changed))
            assert job.verify(made.id) != [], f"byte {position} of {path}"
            flipped += 1
        store.write(path, [data], len(data))
    assert flipped > (15 if place.kind == "s3" else 300)
    assert job.verify(made.id) == []


def test_O_12_a_short_missing_or_torn_file_is_seen_without_reading(place: Place) -> None:
    job = place.job()
    support.save(job, step=5)
    made = support.save(job)
    store = place.store()
    files = place.files()
    path = next(name for name in files if name.endswith(".safetensors"))
    store.write(path, [files[path][:-1]], len(files[path]) - 1)
    # As somebody else sees it: of what is its own, a process asks an object store once.
    infos = {info.id.step: info.rejected for info in place.job().list_checkpoints()}
    assert infos[5] == ""
    assert path.rpartition("/")[2] in infos[10]
    store.remove(path)
    assert "missing" in {info.id.step: info.rejected for info in place.job().list_checkpoints()}[10]
    assert job.verify(made.id) != [], "whoever reads looks again"
    store.write(job.path(made.id, "manifest.json"), [b"{}"], 2)
    with pytest.raises(CheckpointError, match="torn"):
        job.read_manifest(made.id)
    assert "torn" in {info.id.step: info.rejected for info in job.list_checkpoints()}[10]
