"""Files lie in memory where there is some, since every step of every save is synced; and there is a real S3 server."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.processes.storage import s3
from tests.unit.storage.support import Place


@pytest.fixture
def tmp_path() -> Iterator[pathlib.Path]:
    """A folder of this test's own."""
    folder = tempfile.mkdtemp(prefix="lastwords-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fresh(tmp_path: pathlib.Path) -> Fresh:
    """For property tests: a new folder for each example."""
    return Fresh(tmp_path)


class Fresh:
    """Folders one after the other; the one before is removed."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root / "fresh"

    def folder(self) -> pathlib.Path:
        """An empty one."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir()
        return self._root


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3.Server]:
    """One for all tests; this process is its client."""
    pytest.importorskip("obstore", reason="this environment has no client of object stores")
    pytest.importorskip("moto", reason="this environment has no S3 server")
    with s3.running() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["links", "no links", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Place:
    """Where checkpoints go: a folder, with and without links, and an object store."""
    if request.param == "s3":
        server: s3.Server = request.getfixturevalue("s3_server")
        return Place(server.prefix(), "s3")
    return Place(str(tmp_path), request.param)
