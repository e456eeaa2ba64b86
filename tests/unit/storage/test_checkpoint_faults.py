"""Checkpoints on a store that misbehaves: full, read-only, stale, stalled, lagging, vanished."""

from __future__ import annotations

import pathlib
import resource
import signal
import threading

import pytest

from lastwords.protocol import manifest
from lastwords.protocol.manifest import IncompleteError
from lastwords.storage import streams
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.faulty import FaultyStore
from lastwords.storage.posix import PosixStore
from tests.unit.storage import support


def faulty(folder: pathlib.Path) -> tuple[JobCheckpoints, FaultyStore]:
    store = FaultyStore(PosixStore(folder))
    return JobCheckpoints(store, "ns", "job"), store


def test_O_33_a_full_disk_fails_the_save_wherever_it_strikes_and_space_makes_it_go_on(tmp_path: pathlib.Path) -> None:
    job, store = faulty(tmp_path)
    support.save(job, step=5)
    room, kinds = 0, set()
    while True:
        store.full_after = room
        try:
            support.save(job, step=10)
        except StorageError as error:
            kinds.add(error.kind)
            assert [info.id.step for info in support.at(tmp_path).list_checkpoints()] == [5]
            room += 97
            continue
        break
    assert room > 1000
    assert kinds == {"full"}
    assert job.verify(support.identify(10)) == []


def test_O_33_a_real_limit_of_the_process_is_an_error_and_no_end(tmp_path: pathlib.Path) -> None:
    job = support.at(tmp_path)
    support.save(job, step=5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
        with pytest.raises(StorageError) as caught:
            support.save(job, step=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.kind == "full"
    support.save(job, step=10)
    assert [info.id.step for info in job.list_checkpoints()] == [5, 10]


def test_O_33_a_read_only_store_is_an_error_for_writers_and_none_for_readers(tmp_path: pathlib.Path) -> None:
    job, store = faulty(tmp_path)
    support.save(job, step=5)
    store.failing = "read-only"
    with pytest.raises(StorageError) as caught:
        support.save(job, step=10)
    assert caught.value.kind == "read-only"
    assert job.verify(support.identify(5)) == []


def test_O_36_a_stale_handle_leads_to_one_clean_new_try(tmp_path: pathlib.Path) -> None:
    count, store = faulty(tmp_path / "count")
    support.save(count)
    calls = len(store.calls)
    for number in range(calls):
        job, store = faulty(tmp_path / str(number))
        with_stale_call(store, number)
        support.save(job)
        assert not store.stale_once
        assert support.at(tmp_path / str(number)).verify(support.identify(10)) == []


def with_stale_call(store: FaultyStore, number: int) -> None:
    """The call with this number gets a stale handle."""
    begin, count = store._begin, 0

    def counted(what: str, path: str, *, changes: bool = False) -> None:
        nonlocal count
        if count == number:
            store.stale_once = True
        count += 1
        begin(what, path, changes=changes)

    store._begin = counted  # type: ignore[method-assign]


def test_O_36_a_stalled_store_stops_only_whoever_calls_it(tmp_path: pathlib.Path) -> None:
    job, store = faulty(tmp_path)
    store.stalled.clear()
    saver = threading.Thread(target=support.save, args=(job,))
    saver.start()
    assert support.at(tmp_path).list_checkpoints() == []
    store.stalled.set()
    saver.join(10)
    assert job.verify(support.identify(10)) == []


def test_O_34_a_lagging_listing_hides_no_published_checkpoint_and_invents_none(tmp_path: pathlib.Path) -> None:
    job, store = faulty(tmp_path)
    made = support.save(job)
    support.write(job, support.plan(step=20))
    store.hidden = {made.id.folder, manifest.MANIFEST, manifest.part_record(0)}
    assert job.read_manifest(made.id) == made, "read by its exact name"
    assert job.commit(support.plan(step=20)).id.step == 20
    assert [info.id.step for info in job.list_checkpoints(known=[made.id])] == [10, 20]
    job.delete(support.identify(20))
    assert [info.id.step for info in job.list_checkpoints(known=[made.id, support.identify(20)])] == [10]


def test_a_vanished_store_is_an_error_and_not_an_empty_checkpoint(tmp_path: pathlib.Path) -> None:
    job, made = support.at(tmp_path), support.plan()
    support.write(job, made)
    (tmp_path / "ns/job" / support.identify(10).folder / manifest.part_data(0)).unlink()
    with pytest.raises(IncompleteError):
        job.commit(made)


def test_a_save_that_is_given_up_leaves_no_part_record(tmp_path: pathlib.Path) -> None:
    job, made = support.at(tmp_path), support.plan()
    job.write_plan(made)
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(streams.CancelledError):
        job.write_part(made, 0, support.sources(made), b"r", cancelled=cancelled)
    assert job.read_part(made, 0) is None
