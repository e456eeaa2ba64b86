"""Python ahead of an accelerator: what counts is the device's order. On a fake device that works through a queue."""

from __future__ import annotations

import pathlib

import pytest
import torch

from lastwords.protocol import wire
from lastwords.protocol.control import Word
from lastwords.protocol.snapshots import SnapshotPlan
from tests.processes.trainer.fake_agent import FakeAgent, script
from tests.processes.trainer.test_trainer_ranks import NEVER, copy_live, part, settled, stuck

pytestmark = pytest.mark.slow

HANG_AT = 6
SCRIPT = """
    import os, pathlib, sys, time
    import torch
    from lastwords import Checkpointer
    from lastwords.trainer import device
    from tests.processes.trainer import fake_device

    mode, go, hang_at = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    fake = fake_device.FakeDevice()
    device.of = lambda tensors: fake
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 200)
    now = 0

    def between():
        if mode == "slow":
            time.sleep(0.01)
        elif mode == "in-update" and done[0] == hang_at:
            fake_device.wait_for(go)

    done = [0]
    optimizer = fake_device.QueuedSGD(model.parameters(), fake, lr=0.125, between=between)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in checkpointer.steps(int(sys.argv[4])):
        if mode == "before-update" and step == hang_at:
            fake.queue(lambda: fake_device.wait_for(go))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        fake.queue(lambda step=step: done.__setitem__(0, step))
        optimizer.step()
        if mode != "slow":
            time.sleep(0.01)
    """


def expected(step: int) -> dict[str, torch.Tensor]:
    """Parameters at a boundary."""
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 200)
    for made in range(step):
        for parameter in model.parameters():
            parameter.data.sub_(torch.full_like(parameter, made + 1.0), alpha=0.125)
    return {f"model.{name}": value.detach() for name, value in model.state_dict().items()}


def equal(found: dict[str, torch.Tensor], step: int) -> bool:
    wanted = expected(step)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def start(agent: FakeAgent, tmp_path: pathlib.Path, mode: str, steps: int = 1000) -> pathlib.Path:
    go = tmp_path / "go"
    agent.start(script(tmp_path / "train.py", SCRIPT), mode, str(go), str(HANG_AT), str(steps))
    return go


def test_an_update_queued_behind_a_hung_collective_has_not_begun(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.plan = NEVER
    go = start(agent, tmp_path, "before-update")
    agent.wait_for(wire.Boundary, lambda m: m.step == HANG_AT + 1)
    stuck(agent, 0)
    # Python has passed that boundary; the device has not begun the update that leads to it.
    state = settled(agent, 1, [0])[0]
    assert (state.step, state.odd) == (HANG_AT, False)
    assert agent.word(Word.STEP) - 1 == HANG_AT
    assert copy_live(agent, 0, HANG_AT, {0: 0}).error == ""
    assert agent.parts(HANG_AT) == {0: 0}
    assert equal(part(agent, 0, 0), HANG_AT)
    assert "wanted is 7" in copy_live(agent, 0, HANG_AT + 1, {0: 1}, number=2).error
    # The collective comes through after all: the device goes on to where Python is held, an update later.
    go.touch()
    agent.wait_for(wire.HoldState, lambda m: m.step == HANG_AT + 2 and not m.odd)
    assert copy_live(agent, 0, HANG_AT + 2, {0: 1}, number=3).error == ""
    assert equal(part(agent, 1, 0), HANG_AT + 2)


def test_an_update_that_has_begun_on_the_device_is_refused(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.plan = NEVER
    go = start(agent, tmp_path, "in-update")
    agent.wait_for(wire.Boundary, lambda m: m.step == HANG_AT + 1)
    stuck(agent, 0)
    agent.send(0, wire.Hold(hold=1))
    state = agent.wait_for(wire.HoldState)
    assert (state.step, state.odd) == (HANG_AT, True)
    assert copy_live(agent, 0, HANG_AT, {0: 0}).error == "an update has begun"
    go.touch()
    agent.wait_for(wire.HoldState, lambda m: m.step == HANG_AT + 2 and not m.odd)
    assert copy_live(agent, 0, HANG_AT + 2, {0: 0}, number=2).error == ""
    assert equal(part(agent, 0, 0), HANG_AT + 2)


def test_snapshots_wait_for_a_device_that_is_behind(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.plan = SnapshotPlan(number=1, every_steps=1, persist_every=0, from_step=1)
    agent.slots = 2
    start(agent, tmp_path, "slow", steps=12)
    agent.wait_for(wire.Finished)
    assert agent.wait_exit() == 0, agent.log()
    found = {agent.slot(index).step: part(agent, index, 0) for index in range(2) if agent.slot(index)}  # type: ignore[union-attr]
    assert set(found) == {11, 12}
    assert all(equal(values, step) for step, values in found.items())
    assert agent.word(Word.SNAPSHOTS_REJECTED) == 0


def test_python_is_at_most_one_boundary_ahead(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    """Records of two steps are kept: that of the device's step must be one of them."""
    agent.plan = NEVER
    start(agent, tmp_path, "before-update")
    agent.wait_for(wire.Boundary, lambda m: m.step == HANG_AT + 1)
    stuck(agent, 0)
    assert max(m.step for m in agent.all_of(wire.Boundary)) == HANG_AT + 1
