"""Snapshots in one process against a synchronous copy: what is committed equals the boundary, bit by bit."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from lastwords import Checkpointer
from lastwords.protocol import areas, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords.trainer import copying, session, slots
from tests.processes.trainer.fake_agent import FakeAgent

TENSORS = 12


@pytest.fixture
def joined(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """This process as rank 0 of 1."""
    monkeypatch.setenv("LASTWORDS_PROCESSES_PER_WORKER", "1")
    monkeypatch.setenv("RANK", "0")
    mine = session.Session.connect(str(agent.folder), 0, 1, True)
    mine.wait_welcome(10)
    yield agent
    mine.close()


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory so slow that an update surely happens during the copy, if nothing prevents it."""
    original = copying.copy_out

    def slow(source: torch.Tensor, address: int, nbytes: int) -> None:
        time.sleep(0.004)
        original(source, address, nbytes)

    monkeypatch.setattr(copying, "copy_out", slow)


class Parameters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.ParameterList(torch.zeros(1000) for _ in range(TENSORS))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for index, slots_ in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.state.model.{names[index]}.{key}": value.clone() for key, value in slots_.items()}
    return found


def read_part(agent: FakeAgent, slot: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load((agent.folder / volume.part(slot, 0)).read_bytes())


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def run(agent: FakeAgent, mode: str, *, waits: bool, checks: bool = True, steps: int = 6) -> tuple[int, int]:
    """Snapshot at each step; returns how many parts were committed and how many of them are not what was to be kept."""
    model = Parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, mode=mode)
    stager = checkpointer._work._stager  # type: ignore[union-attr]
    stager.checks_changes = checks
    checkpointer.restore()
    committed = wrong = 0
    for step in range(1, steps + 1):
        if waits:
            checkpointer.wait()
        train_step(model, optimizer)
        checkpointer.step_done()
        synchronous = state_of(model, optimizer)
        job = stager._job
        if not waits and mode == "manual":
            for _ in range(3):
                train_step(model, optimizer)
                time.sleep(0.005)
        elif waits:
            checkpointer.wait()
            train_step(model, optimizer)
        else:
            train_step(model, optimizer)
        assert job is not None and job.done.wait(20)
        # A slot is free again only when its step is decided; without waiting for that, steps this short skip snapshots.
        deadline = time.monotonic() + 20
        while stager.floors.is_open(step):
            assert time.monotonic() < deadline
            stager.floors.wait_change(0.1)
        for slot in range(2):
            record = agent.slot(slot)
            if record is not None and record.step == step:
                committed += 1
                wrong += not equal(read_part(agent, slot), synchronous)
    stager.close()
    return committed, wrong


def test_o_39_without_the_sync_point_the_snapshot_is_trampled(joined: FakeAgent, slow_copies: None) -> None:
    committed, wrong = run(joined, "manual", waits=False, checks=False)
    assert committed == 6 and wrong >= 5


def test_o_39_a_forgotten_wait_is_noticed_and_nothing_wrong_is_kept(joined: FakeAgent, slow_copies: None) -> None:
    committed, wrong = run(joined, "manual", waits=False)
    assert wrong == 0
    assert joined.word(Word.SNAPSHOTS_REJECTED) + committed == 6 and joined.word(Word.SNAPSHOTS_REJECTED) >= 5


@pytest.mark.parametrize(("mode", "waits"), [("overlap", False), ("manual", True), ("blocking", False)])
def test_o_39_with_the_sync_point_every_snapshot_equals_a_synchronous_copy(
    joined: FakeAgent, slow_copies: None, mode: str, waits: bool
) -> None:
    committed, wrong = run(joined, mode, waits=waits)
    assert committed == 6 and wrong == 0
    assert joined.word(Word.SNAPSHOTS_REJECTED) == 0


def test_tensors_of_all_kinds_are_kept_bit_by_bit(joined: FakeAgent) -> None:
    """Host tensors, views, tied weights, zero-size, strided and 16-bit ones."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 4)
            self.tied = torch.nn.Linear(3, 4)
            self.tied.weight = self.a.weight
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))
            self.strided = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.half_width = torch.nn.Parameter(torch.randn(5, 7).bfloat16().t())
            self.view = torch.nn.Parameter(torch.randn(10)[2:7])
            self.complex_one = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).t())

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, mode="blocking")
    checkpointer.restore()
    checkpointer.step_done()
    joined.wait_for(wire.SnapshotReady)
    kept = read_part(joined, joined.parts(1)[0])
    expected = {f"model.{name}": value for name, value in model.state_dict().items() if value.numel()}
    del expected["model.tied.weight"]
    assert kept.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(kept[name], value) and kept[name].dtype == value.dtype, name


def test_o_40_a_slot_that_the_agent_reads_is_not_overwritten(joined: FakeAgent) -> None:
    pins = joined.folder / volume.PINS
    pins.write_bytes(bytes(8 * 2))
    model = Parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    stager = checkpointer._work._stager  # type: ignore[union-attr]
    checkpointer.restore()

    def step() -> None:
        train_step(model, optimizer)
        checkpointer.step_done()
        train_done = stager._job
        assert train_done is not None
        # Time for the copy, as a forward and backward would give it.
        train_done.done.wait(0.3)

    step()
    held = joined.parts(1)[0]
    with pins.open("r+b") as file:
        os.pwrite(file.fileno(), (2).to_bytes(8, "little"), 8 * held)
    before = (joined.folder / volume.part(held, 0)).read_bytes()
    for _ in range(20):
        step()
    record = joined.slot(held)
    assert record is not None and record.step == 1
    assert (joined.folder / volume.part(held, 0)).read_bytes() == before
    assert joined.word(Word.SNAPSHOTS_SKIPPED) >= 1
    pins.write_bytes(bytes(8 * 2))
    skipped, taken = joined.word(Word.SNAPSHOTS_SKIPPED), joined.word(Word.SNAPSHOTS)
    for _ in range(3):
        step()
    assert joined.word(Word.SNAPSHOTS) >= taken + 2 and joined.word(Word.SNAPSHOTS_SKIPPED) <= skipped + 1


def test_a_pin_between_check_and_invalidation_leaves_the_part_valid(
    joined: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Parameters()
    checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), mode="blocking")
    checkpointer.restore()
    checkpointer.step_done(), checkpointer.step_done()
    stager = checkpointer._work._stager  # type: ignore[union-attr]
    joined.wait_for(wire.SnapshotReady, lambda m: m.step == 2)
    slot = stager._slots[joined.parts(1)[0]]
    answers = iter([False, True])
    monkeypatch.setattr(slots.Pins, "pinned", lambda *_: next(answers))
    assert not stager._invalidate(slot)
    assert slot.committed().step == 1


def test_a_snapshot_that_is_not_finite_is_marked(joined: FakeAgent) -> None:
    model = Parameters()
    checkpointer = Checkpointer(model=model, mode="blocking")
    checkpointer.restore()
    checkpointer.step_done()
    joined.wait_for(wire.SnapshotReady, lambda m: m.step == 1)
    with torch.no_grad():
        model.rows[3][5] = float("nan")
    checkpointer.step_done()
    joined.wait_for(wire.SnapshotReady, lambda m: m.step == 2)
    first, second = (joined.slot(joined.parts(step)[0]) for step in (1, 2))
    assert first is not None and first.finite and second is not None and not second.finite


def test_o_35_too_little_memory_is_said_with_both_figures(joined: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTWORDS_MEMORY_LIMIT_BYTES", "10000")
    model = Parameters()
    checkpointer = Checkpointer(model=model)
    checkpointer.restore()
    checkpointer.step_done()
    notice = joined.wait_for(wire.RankNotice)
    assert notice.code == "no-memory" and notice.fatal and "MiB" in notice.text
    checkpointer.step_done()
    assert joined.parts(1) == {}


def test_o_35_one_slot_is_used_when_two_do_not_fit(joined: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTWORDS_MEMORY_LIMIT_BYTES", str(TENSORS * 4000 + 8192))
    checkpointer = Checkpointer(model=Parameters(), mode="blocking")
    checkpointer.restore()
    for _ in range(3):
        checkpointer.step_done()
    assert joined.wait_for(wire.RankNotice).code == "little-memory"
    joined.wait_for(wire.SnapshotReady, lambda m: m.step == 3)
    assert joined.parts(3) == {0: 0}


def test_o_35_a_full_volume_is_an_error_and_no_sigbus(
    memory_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(slots.NoMemoryError, match=r"1000 bytes are needed for part, \d+ are free"):
        slots.Mapped(str(memory_folder / "part"), 1000)
    assert (memory_folder / "part").stat().st_size == 0


def test_records_outgrow_their_areas_without_losing_one(memory_folder: pathlib.Path) -> None:
    records = slots.Records(str(memory_folder), 0)
    records.write(4, b"a" * 1000, provisional=False)
    records.write(5, b"b" * 2_000_000, provisional=True)
    again = slots.Records(str(memory_folder), 0)
    assert again.read(4, provisional=False) == b"a" * 1000
    assert again.read(5, provisional=True) == b"b" * 2_000_000
    assert again.read(4, provisional=True) is None


def test_a_torn_slot_is_refused(memory_folder: pathlib.Path) -> None:
    slot = slots.Slot(str(memory_folder), 0, 0)
    assert slot.committed() is None
    areas.commit(slot.commit.view, b'{"step":1}')
    assert slot.committed() is None
    areas.invalidate(slot.commit.view)
    assert slots.Slot(str(memory_folder), 0, 0).committed() is None


def test_the_plan_is_followed(joined: FakeAgent) -> None:
    session_ = session.current()
    assert session_ is not None and session_.welcome is not None
    joined.plan = SnapshotPlan(number=1, every_steps=1, persist_every=0, from_step=1)
    checkpointer = Checkpointer(model=Parameters(), mode="blocking")
    checkpointer.restore()
    checkpointer.step_done()
    joined.send(0, wire.NewPlan(plan=SnapshotPlan(number=2, every_steps=3, persist_every=2, from_step=5)))
    deadline = time.monotonic() + 10
    while not checkpointer._work._planner._offers:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for _ in range(11):
        checkpointer.step_done()
    joined.wait_for(wire.SnapshotReady, lambda m: m.step == 11)
    ready = [(m.step, m.persist) for m in joined.all_of(wire.SnapshotReady)]
    assert ready == [(1, False), (2, False), (3, False), (4, False), (5, True), (8, False), (11, True)]
    assert joined.word(Word.PLAN_NUMBER) == 2
