"""What tests of whole jobs share."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.processes.run import cases


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Result of the undisturbed run of the reference model."""
    return cases.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[cases.Run]:
    """A job that leaves nothing behind."""
    memory = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    one = cases.Run(tmp_path, memory)
    yield one
    one.clean_up()
    shutil.rmtree(memory, ignore_errors=True)
