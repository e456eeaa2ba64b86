"""Files of these tests lie in memory where there is some: they sync after every step of every save."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest


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
