"""One contract for each port, kept by the fake and by the real one."""

from __future__ import annotations

import json
import pathlib

import pytest

from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.messages import RestorePlan, RestoreSource
from lastwords_operator.coordinator import fakes, ports
from lastwords_operator.core.model import FaultKind, JobState, JobStatus, Recovery
from lastwords_operator.core.observation import Event
from lastwords_operator.local.folder import FolderError, JobFolder, read_lines
from lastwords_operator.local.store import FileEvents, FileStatusStore, SystemClock, next_epoch

STATUS = JobStatus(
    state=JobState.RUNNING,
    attempt=3,
    lineage=(LineageEntry(attempt=3, step=12, parent=2),),
    restore=RestorePlan(source=RestoreSource.MEMORY, step=12, attempt=2, parts={0: 1, 1: 0}, records={0: 1}),
    recoveries=(Recovery(kind=FaultKind.HANG, message="rank 2 hangs", attempt=2, steps_lost=0),),
    incarnations={0: "a", 1: "b"},
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> JobFolder:
    return JobFolder(tmp_path)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, folder: JobFolder) -> ports.StatusStore:
    return fakes.MemoryStatusStore() if request.param == "memory" else FileStatusStore(folder)


async def test_a_new_store_is_empty(store: ports.StatusStore) -> None:
    assert await store.load() == (None, 0)


async def test_what_was_saved_is_loaded(store: ports.StatusStore) -> None:
    version = await store.save(STATUS, 0)
    assert await store.load() == (STATUS, version)
    assert version > 0


async def test_an_old_version_is_a_conflict_and_changes_nothing(store: ports.StatusStore) -> None:
    first = await store.save(STATUS, 0)
    newer = JobStatus(attempt=4)
    second = await store.save(newer, first)
    for version in (0, first, second + 1):
        with pytest.raises(ports.ConflictError):
            await store.save(STATUS, version)
    assert await store.load() == (newer, second)


async def test_a_damaged_status_is_an_error_not_an_empty_job(folder: JobFolder) -> None:
    store = FileStatusStore(folder)
    await store.save(STATUS, 0)
    for text in ("", "{", "[]", '{"version": 1}', '{"version": 1, "status": {"attempt": "three"}}'):
        folder.status_file.write_text(text)
        with pytest.raises(FolderError, match="status.json"):
            await store.load()


async def test_events_are_one_line_each_and_told_at_once(folder: JobFolder) -> None:
    heard: list[dict[str, object]] = []
    events = FileEvents(folder, heard.append)
    await events.emit(12.5, Event(reason="RankKilled", message="rank 1\ndied", warning=True, rank=1))
    row = {"at": 12.5, "reason": "RankKilled", "message": "rank 1\ndied", "warning": True, "worker": None, "rank": 1}
    assert heard == [row]
    assert read_lines(folder.events_file) == [row]
    memory = fakes.MemoryEvents()
    await memory.emit(1.0, Event(reason="x", message="y"))
    assert memory.emitted == [(1.0, Event(reason="x", message="y"))]


def test_the_clock_never_goes_back() -> None:
    clock = SystemClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)


def test_each_coordinator_has_a_higher_epoch(folder: JobFolder) -> None:
    assert [next_epoch(folder) for _ in range(3)] == [1, 2, 3]
    (folder.path / "epoch").write_text(json.dumps("x"))
    with pytest.raises(FolderError, match="epoch is damaged"):
        next_epoch(folder)
