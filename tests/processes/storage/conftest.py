"""Jobs whose checkpoints go to a real S3 server, or to storage that misbehaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.storage import s3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """This process and those that it starts are its clients."""
    with s3.running() as one:
        for name, value in one.variables.items():
            monkeypatch.setenv(name, value)
        yield one
