"""The codec: round trips, N-1 compatibility, errors that name the path."""

from __future__ import annotations

import json

import pytest

from lastwords.protocol import codec, messages, pieces, wire
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.snapshots import SnapshotPlan

TOPOLOGY = pieces.Topology(workers=2, processes_per_worker=2)
ORDER = messages.WorkerOrder(
    epoch=3,
    number=9,
    attempt=2,
    run=messages.RunState.RUNNING,
    topology=TOPOLOGY,
    lineage=(LineageEntry(1, 0, 0), LineageEntry(2, 40, 1)),
    restore=messages.RestorePlan(
        source=messages.RestoreSource.MEMORY, step=40, attempt=1, parts={0: 0, 1: 1}, records={0: 0}, exact=False
    ),
    peers={0: "127.0.0.1:1", 1: "127.0.0.1:2"},
    live_copy=messages.LiveCopy(number=4, step=41, writers={0: 1}),
    plan=SnapshotPlan(number=2, every_steps=5, persist_every=3, from_step=10, stop_after=99),
    in_use=(CheckpointId(step=40, attempt=1),),
)


def test_an_order_survives_the_round_trip() -> None:
    assert codec.loads(messages.WorkerOrder, codec.dumps(ORDER)) == ORDER


def test_equal_values_give_equal_bytes() -> None:
    again = codec.loads(messages.WorkerOrder, json.dumps(json.loads(codec.dumps(ORDER))))
    assert codec.dumps(again) == codec.dumps(ORDER)


def test_a_newer_sender_may_add_keys_and_an_older_one_may_lack_those_with_defaults() -> None:
    data = json.loads(codec.dumps(ORDER))
    data["from_the_future"] = {"a": 1}
    del data["in_use"]
    assert codec.from_plain(messages.WorkerOrder, data).in_use == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"epoch": "3"}, "WorkerOrder.epoch: expected int, got str"),
        ({"epoch": True}, "WorkerOrder.epoch: expected int, got bool"),
        ({"run": "dancing"}, "WorkerOrder.run: 'dancing' is not one of stopped, running, ended"),
        ({"lineage": [{"attempt": 1}]}, r"WorkerOrder.lineage\[0\].step: missing"),
        ({"topology": []}, "WorkerOrder.topology: expected an object, got list"),
        ({"lineage": 3}, "WorkerOrder.lineage: expected a list, got int"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(change: dict[str, object], path: str) -> None:
    with pytest.raises(codec.DecodeError, match=path):
        codec.from_plain(messages.WorkerOrder, json.loads(codec.dumps(ORDER)) | change)


def test_a_required_key_that_is_missing_is_named() -> None:
    with pytest.raises(codec.DecodeError, match="Hello.worker: missing"):
        codec.loads(messages.Hello, b"{}")


@pytest.mark.parametrize("line", [b"", b"[]", b"nonsense", b'{"kind":"Rocket"}', b'{"kind":"Hold"}'])
def test_a_line_that_is_no_message_is_a_decode_error_and_nothing_else(line: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        wire.decode(line)


def test_a_wire_message_survives_the_round_trip() -> None:
    message = wire.CopyLive(number=1, step=5, parts={0: 1, 1: 0})
    line = wire.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode(line) == message
