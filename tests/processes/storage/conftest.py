"""Jobs whose checkpoints go to a real S3 server, or to storage that misbehaves."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.processes.run import cases
from tests.processes.storage import s3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """This process and those that it starts are its clients."""
    with s3.running() as one:
        for name, value in one.variables.items():
            monkeypatch.setenv(name, value)
        yield one


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Result of the undisturbed run."""
    return cases.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[cases.Run]:
    """A job that leaves nothing behind."""
    memory = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    one = cases.Run(tmp_path, memory)
    yield one
    one.clean_up()
    shutil.rmtree(memory, ignore_errors=True)
