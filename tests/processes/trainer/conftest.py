"""Fixtures of the trainer's process tests: an agent in a folder in memory."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.processes.trainer import fake_agent


@pytest.fixture
def memory_folder() -> Iterator[pathlib.Path]:
    """In a tmpfs, as memory volumes are."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lastwords-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def agent(memory_folder: pathlib.Path) -> Iterator[fake_agent.FakeAgent]:
    with fake_agent.agent(memory_folder / "volume") as fake:
        yield fake
