"""The job folder: one who acts, files that are whole, memory that belongs to us."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from lastwords_operator.local import folder as folders
from lastwords_operator.local.folder import FolderError, JobFolder


@pytest.fixture
def memory() -> Iterator[pathlib.Path]:
    """A short path: sockets are made below it."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(tmp_path: pathlib.Path, memory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory / "run"))
    return JobFolder(tmp_path / "job", memory)


def test_only_one_holds_the_lock_and_its_death_frees_it(folder: JobFolder) -> None:
    code = "import pathlib, sys\nfrom lastwords_operator.local.folder import JobFolder\n"
    code += f"assert JobFolder(pathlib.Path({str(folder.path)!r})).lock() or sys.exit(3)\nprint('held', flush=True)\n"
    holder = subprocess.Popen([sys.executable, "-c", code + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert not folder.lock()
    assert folder.locked_by() == holder.pid
    holder.kill()
    holder.communicate()
    assert folder.locked_by() is None
    assert folder.lock()
    assert JobFolder(folder.path).locked_by() == os.getpid()
    folder.unlock()
    assert folder.locked_by() is None


def test_socket_paths_are_short_however_deep_the_folder_is(tmp_path: pathlib.Path) -> None:
    deep = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 10)
    job = JobFolder(deep)
    for path in (job.socket, job.volume(9999) / "agent.sock"):
        assert len(os.fsencode(path)) <= folders.SOCKET_PATH_BYTES


def test_a_memory_folder_that_is_too_long_for_sockets_is_refused(
    tmp_path: pathlib.Path, memory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory))
    deep = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 5)
    deep.mkdir(parents=True)
    with pytest.raises(FolderError, match="too long for a socket .* use a shorter --memory-dir"):
        JobFolder(tmp_path / "job", deep).prepare()


def test_the_memory_stays_where_it_was_first(folder: JobFolder, memory: pathlib.Path) -> None:
    folder.prepare()
    assert JobFolder(folder.path).memory == folder.memory
    assert folder.memory.is_relative_to(memory)
    assert folder.memory.stat().st_mode & 0o777 == 0o700
    assert folder.token_file.stat().st_mode & 0o777 == 0o600
    token = folder.token()
    folder.prepare()
    assert folder.token() == token


def test_a_folder_that_somebody_else_put_there_is_refused(folder: JobFolder, tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.memory.symlink_to(elsewhere)
    with pytest.raises(FolderError, match="belongs to somebody else"):
        folder.prepare()


def test_a_torn_last_line_hides_no_later_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    folders.append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "text": "the process died he')
    folders.append_line(path, {"n": 3})
    assert folders.read_lines(path) == [{"n": 1}, {"n": 3}]


def test_damaged_json_is_an_error_that_names_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job.json"
    assert folders.read_json(path) is None
    path.write_text("{")
    with pytest.raises(FolderError, match="job.json is damaged"):
        folders.read_json(path)


def test_replacing_a_file_leaves_nothing_beside_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "status.json"
    for number in range(3):
        folders.replace_file(path, json.dumps(number).encode())
    assert json.loads(path.read_text()) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_memory_is_freed_with_everything_in_it(folder: JobFolder) -> None:
    folder.prepare()
    folder.volume(0).mkdir()
    (folder.volume(0) / "slot").write_bytes(b"x" * 100_000)
    free, taken = folders.memory_room(folder)
    assert free > 0
    assert taken >= 100_000
    folder.remove_volumes()
    assert not folder.memory.exists()
