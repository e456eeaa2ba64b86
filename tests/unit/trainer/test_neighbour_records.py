"""The last gradient waits for the early record to be elsewhere, but never for a neighbour that does not keep up."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from lastwords.protocol import wire
from lastwords.trainer import neighbour


class FakeSession:
    def __init__(self, workers: int) -> None:
        self.topology = types.SimpleNamespace(workers=workers)
        self.sent: list[Any] = []
        self.handler: Any = None

    def on(self, kind: type, handler: Any) -> None:
        assert kind is wire.RecordKept
        self.handler = handler

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def keeps(self, step: int) -> None:
        self.handler(wire.RecordKept(step=step))


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "WAIT_SECONDS", 0.2)


def _records(session: FakeSession) -> neighbour.NeighbourRecords:
    return neighbour.NeighbourRecords(session)  # type: ignore[arg-type]


def test_waits_until_the_record_is_kept() -> None:
    session = FakeSession(2)
    records = _records(session)
    records.offer(1)
    assert session.sent == [wire.RecordWritten(step=1)]
    threading.Timer(0.05, session.keeps, [1]).start()
    assert 0.04e9 < records.wait() < 0.2e9
    assert records.wait() == 0


def test_a_neighbour_that_does_not_answer_costs_one_wait_only() -> None:
    session = FakeSession(2)
    records = _records(session)
    records.offer(1)
    assert records.wait() >= 0.2e9
    for step in (2, 3):
        records.offer(step)
        assert records.wait() == 0
    session.keeps(3)
    records.offer(4)
    threading.Timer(0.02, session.keeps, [4]).start()
    assert records.wait() > 0, "it has caught up: waited for again"
    assert records._kept == 4


def test_a_job_with_one_worker_has_no_neighbour() -> None:
    session = FakeSession(1)
    records = _records(session)
    records.offer(1)
    assert session.sent == []
    assert records.wait() == 0
