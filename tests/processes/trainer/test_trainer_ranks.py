"""Rank processes under a fake agent: last words beside a stuck main thread, holds, restarts, refusals."""

from __future__ import annotations

import json
import pathlib
import signal
import time
from typing import Any

import pytest
import safetensors.torch
import torch

from lastwords.protocol import areas, control, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords.trainer import hoststate
from tests.processes.trainer.fake_agent import FakeAgent, script

REFERENCE = pathlib.Path(__file__).parents[2] / "reference" / "train_reference.py"
NEVER = SnapshotPlan(number=1, every_steps=1000, persist_every=0, from_step=1000)

TRAIN = """
    import os, sys, time, json
    import torch, torch.distributed as dist
    from lastwords import Checkpointer
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 20))
    if os.environ.get("UNEQUAL") and rank == 1:
        model[2].bias.data += 1
    inner = model
    if world > 1 and not os.environ.get("UNEQUAL"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in checkpointer.steps(int(sys.argv[1])):
        time.sleep(float(os.environ.get("PAUSE", "0.01")))
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(4, 20)).square().mean()
        loss.backward()
        optimizer.step()
        checkpointer.report(loss=loss.item())
        if os.environ.get("KEEP"):
            torch.save({"model": inner.state_dict(), "optimizer": optimizer.state_dict()},
                       os.path.join(os.environ["KEEP"], f"{step + 1}-{rank}.pt"))
    """


@pytest.fixture
def train(tmp_path: pathlib.Path) -> pathlib.Path:
    return script(tmp_path / "train.py", TRAIN)


def part(agent: FakeAgent, slot: int, rank: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load((agent.folder / volume.part(slot, rank)).read_bytes())


def expected(path: pathlib.Path) -> dict[str, torch.Tensor]:
    saved = torch.load(path, weights_only=True)
    found = {f"model.{name}": value for name, value in saved["model"].items()}
    for index, name in enumerate(list(saved["model"])):
        found |= {f"optimizer.state.model.{name}.{key}": v for key, v in saved["optimizer"]["state"][index].items()}
    return found


def settled(agent: FakeAgent, number: int, ranks: list[int]) -> dict[int, wire.HoldState]:
    """Hold the ranks and wait until each is even: at the gate, or in a collective."""
    for rank in ranks:
        agent.send(rank, wire.Hold(hold=number))
    return {rank: agent.wait_for(wire.HoldState, lambda m: m.hold == number and not m.odd, rank=rank) for rank in ranks}


def stuck(agent: FakeAgent, rank: int) -> None:
    """Wait until the rank's step has not changed for half a second."""
    seen, since = agent.word(Word.STEP, rank), time.monotonic()
    deadline = since + 30
    while time.monotonic() - since < 0.5:
        now = agent.word(Word.STEP, rank)
        if now != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def copy_live(agent: FakeAgent, rank: int, step: int, parts: dict[int, int], number: int = 1) -> wire.LiveCopyDone:
    agent.send(rank, wire.CopyLive(number=number, step=step, parts=parts))
    done = agent.wait_for(wire.LiveCopyDone, lambda m: m.number == number, rank=rank)
    assert isinstance(done, wire.LiveCopyDone)
    return done


@pytest.mark.slow
def test_live_copy_beside_a_main_thread_stuck_in_a_collective(
    agent: FakeAgent, train: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    agent.plan = NEVER
    agent.start(train, "10000", world=2, KEEP=str(tmp_path))
    agent.wait_for(wire.Boundary, lambda m: m.step >= 5, rank=0)
    agent.processes[1].send_signal(signal.SIGSTOP)
    stuck(agent, 0)
    agent.send(0, wire.DumpStacks(number=7))
    stacks = agent.wait_for(wire.Stacks, lambda m: m.number == 7).stack
    assert stacks.responsive and "train.py" in stacks.text and stacks.in_collective
    states = settled(agent, 1, [0])
    step = agent.word(Word.STEP) - 1
    assert states[0].step == step
    began = time.monotonic()
    # Its own part, and that of the neighbour that does not answer.
    assert copy_live(agent, 0, step, {0: 0, 1: 0}).error == ""
    assert time.monotonic() - began < 5
    both = part(agent, 0, 0) | part(agent, 0, 1)
    wanted = expected(tmp_path / f"{step}-0.pt")
    assert both.keys() == wanted.keys()
    assert all(torch.equal(both[name], wanted[name]) for name in wanted)
    assert agent.parts(step) == {0: 0, 1: 0}
    # A step that is not there is refused, and the parts stay.
    assert "wanted is 1" in copy_live(agent, 0, 1, {0: 1}, number=2).error


@pytest.mark.slow
def test_a_held_rank_waits_at_the_gate_and_may_be_released_for_one_update(
    agent: FakeAgent, train: pathlib.Path
) -> None:
    agent.start(train, "100000", world=1)
    agent.wait_for(wire.Boundary, lambda m: m.step >= 3)
    agent.send(0, wire.Hold(hold=1))
    state = agent.wait_for(wire.HoldState, lambda m: m.at_gate)
    assert not state.odd and agent.word(Word.AT_GATE) == 1 and agent.word(Word.HOLD) == 1
    agent.send(0, wire.Hold(hold=1, release_to=state.step + 1))
    after = agent.wait_for(wire.HoldState, lambda m: m.at_gate and m.step == state.step + 1)
    stuck(agent, 0)
    assert agent.word(Word.STEP) - 1 == after.step
    assert copy_live(agent, 0, after.step, {0: 1}).error == ""
    agent.send(0, wire.Release(hold=1))
    agent.wait_for(wire.Boundary, lambda m: m.step >= after.step + 5)
    assert agent.word(Word.HOLD) == 0


@pytest.mark.slow
def test_a_step_without_an_update_does_not_pass_its_boundary_while_held(
    agent: FakeAgent, tmp_path: pathlib.Path
) -> None:
    code = """
        import torch
        from lastwords import Checkpointer
        model = torch.nn.Linear(2, 2)
        checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
        for step in checkpointer.steps(10**9):
            pass
        """
    agent.start(script(tmp_path / "idle.py", code))
    agent.wait_for(wire.Boundary, lambda m: m.step >= 3)
    agent.send(0, wire.Hold(hold=1))
    state = agent.wait_for(wire.HoldState, lambda m: m.at_gate)
    stuck(agent, 0)
    assert agent.word(Word.STEP) - 1 == state.step
    assert copy_live(agent, 0, state.step, {0: 0}).error == ""


@pytest.mark.slow
def test_live_copy_in_mid_update_is_refused(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    code = TRAIN.replace("checkpointer.report(", "step == 4 and time.sleep(1000) or checkpointer.report(")
    agent.start(script(tmp_path / "train.py", code), "100")
    agent.wait_for(wire.Boundary, lambda m: m.step >= 4)
    stuck(agent, 0)
    agent.send(0, wire.Hold(hold=1))
    assert agent.wait_for(wire.HoldState).odd
    assert copy_live(agent, 0, 4, {0: 0}).error == "an update has begun"
    assert set(agent.parts(4)) == {0} and agent.slot(agent.parts(4)[0]).step == 4  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_exception_leaves_the_state_to_be_copied_before_the_end(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.plan, agent.may_exit = NEVER, False
    code = TRAIN.replace(
        "checkpointer.report(", "assert step < 4, 'as if it were a bug'; checkpointer.report("
    ).replace("optimizer.zero_grad()", "assert step < 4, 'as if it were a bug'; optimizer.zero_grad()")
    agent.start(script(tmp_path / "train.py", code), "100")
    ended = agent.wait_for(wire.ScriptEnded)
    assert ended.exit.exception == "AssertionError"
    settled(agent, 1, [0])
    assert copy_live(agent, 0, 4, {0: 0}).error == ""
    agent.send(0, wire.MayExit())
    assert agent.wait_exit() == 1


@pytest.mark.slow
def test_o_40_killed_at_any_moment_every_committed_slot_is_whole(
    agent: FakeAgent, train: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    accepted = 0
    for attempt, pause in enumerate((0.0, 0.003, 0.007, 0.011), start=1):
        keep = tmp_path / str(attempt)
        keep.mkdir()
        agent.start(train, "100000", attempt=attempt, KEEP=str(keep), PAUSE="0")
        agent.wait_for(wire.Boundary, lambda m: m.step >= 10)
        time.sleep(pause)
        agent.processes[0].kill()
        agent.processes[0].wait()
        step = agent.word(Word.STEP) - 1
        for slot in range(2):
            path = agent.folder / volume.part_commit(slot, 0)
            committed = areas.read(memoryview(path.read_bytes()))
            if committed is None:
                continue
            record = agent.slot(slot)
            assert record is not None, "a committed slot whose bytes are not what was summed"
            if record.attempt == attempt:
                assert record.step <= step
                wanted = expected(keep / f"{record.step}-0.pt")
                found = part(agent, slot, 0)
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
                accepted += 1
    assert accepted >= 4


def losses(path: pathlib.Path, rank: int) -> dict[int, str]:
    rows: dict[int, str] = {}
    for line in pathlib.Path(f"{path}.rank{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert rows.setdefault(row["step"], row["loss"]) == row["loss"], f"step {row['step']} was done in two ways"
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_o_42_the_reference_model_is_bit_equal_after_kills(
    agent: FakeAgent, tmp_path: pathlib.Path, world: int
) -> None:
    agent.plan = SnapshotPlan(number=1, every_steps=2, persist_every=0, from_step=2)
    out = {name: tmp_path / f"{name}.json" for name in ("undisturbed", "killed")}
    agent.start(REFERENCE, "--steps", "30", "--out", str(out["undisturbed"]), world=world)
    agent.wait_for(wire.Finished)
    assert [agent.wait_exit(rank) for rank in range(world)] == [0] * world
    for attempt, target in enumerate((5, 12, 23), start=2):
        agent.start(
            REFERENCE, "--steps", "30", "--out", str(out["killed"]), "--step-seconds", "0.02",
            world=world, attempt=attempt,
        )  # fmt: skip
        agent.wait_for(wire.Boundary, lambda m, target=target: m.step >= target)  # type: ignore[misc]
        for rank in range(world):
            agent.processes[rank].kill()
        for rank in range(world):
            agent.processes[rank].wait()
        best = max((s, a) for a in range(2, attempt + 1) for s in range(31) if len(agent.parts(s, a)) == world)
        agent.restore = {rank: agent.restore_order(best[0], rank, best[1]) for rank in range(world)}
    agent.start(REFERENCE, "--steps", "30", "--out", str(out["killed"]), world=world, attempt=5)
    agent.wait_for(wire.Finished)
    assert [agent.wait_exit(rank) for rank in range(world)] == [0] * world
    assert json.loads(out["undisturbed"].read_text()) == json.loads(out["killed"].read_text())
    for rank in range(world):
        assert losses(out["undisturbed"], rank) == losses(out["killed"], rank)


@pytest.mark.slow
def test_the_agent_dies_and_comes_back(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "100000")
    agent.wait_for(wire.SnapshotReady, lambda m: m.step >= 3)
    agent.disconnect()
    step = agent.word(Word.STEP)
    deadline = time.monotonic() + 20
    while agent.word(Word.STEP) < step + 5:
        assert time.monotonic() < deadline, "training must not need the agent"
        time.sleep(0.01)
    agent.messages.clear()
    agent.listen()
    assert agent.wait_for(wire.RankHello).resumed
    assert agent.wait_for(wire.LayoutReady).generation == 1
    assert agent.wait_for(wire.SnapshotReady).step >= step
    agent.send(0, wire.Hold(hold=1))
    agent.wait_for(wire.HoldState, lambda m: m.at_gate)


@pytest.mark.slow
def test_a_plan_is_taken_only_when_all_ranks_have_it(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "100000", world=2, PAUSE="0.03")
    agent.wait_for(wire.Boundary, lambda m: m.step >= 2, rank=0)
    now = agent.word(Word.STEP) - 1
    lonely = SnapshotPlan(number=2, every_steps=50, persist_every=0, from_step=now + 10)
    agent.send(0, wire.NewPlan(plan=lonely))
    agent.wait_for(wire.Boundary, lambda m: m.step >= now + 12, rank=1)
    assert [agent.word(Word.PLAN_NUMBER, rank) for rank in range(2)] == [1, 1]
    now = agent.word(Word.STEP) - 1
    stop = SnapshotPlan(number=3, every_steps=1, persist_every=0, from_step=1, stop_after=now + 15)
    for rank in range(2):
        agent.send(rank, wire.NewPlan(plan=stop))
    for rank in range(2):
        assert agent.wait_for(wire.Finished, rank=rank).step == now + 15
        assert agent.wait_exit(rank) == 0
        assert agent.word(Word.DONE, rank) == 1
    assert set(agent.parts(now + 15)) == {0, 1}
    kept = [m for m in agent.all_of(wire.SnapshotReady, rank=0) if m.step == now + 15]
    assert kept and all(m.persist for m in kept)


@pytest.mark.slow
def test_provisional_records_count_once_they_have_proved_right(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "100000", PAUSE="0.02")
    agent.wait_for(wire.Boundary, lambda m: m.step >= 4)
    agent.send(0, wire.Hold(hold=1))
    state = agent.wait_for(wire.HoldState, lambda m: m.at_gate)

    def record(step: int, *, provisional: bool) -> Any:
        data = memoryview((agent.folder / volume.records(0)).read_bytes())
        size = len(data) // volume.RECORD_AREAS
        index = volume.record_area_index(step, provisional=provisional)
        body = areas.read(data[index * size : (index + 1) * size])
        assert body is not None
        return hoststate.parse_record(body)

    final, coming = record(state.step, provisional=False), record(state.step + 1, provisional=True)
    assert (final.head.step, final.head.provisional) == (state.step, False)
    assert (coming.head.step, coming.head.provisional, coming.head.exact) == (state.step + 1, True, True)
    assert coming.part("shared") is None and "random" in coming.part("own")
    agent.send(0, wire.Hold(hold=1, release_to=state.step + 1))
    agent.wait_for(wire.HoldState, lambda m: m.at_gate and m.step == state.step + 1)
    after = record(state.step + 1, provisional=False)
    assert after.metadata["own"] == coming.metadata["own"]


@pytest.mark.slow
def test_a_rank_restores_from_a_provisional_record_and_the_shared_one(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "6", world=2)
    for rank in range(2):
        agent.wait_for(wire.Finished, rank=rank)
        agent.wait_exit(rank)
    orders = {rank: agent.restore_order(6, rank) for rank in range(2)}
    data = memoryview((agent.folder / volume.records(1)).read_bytes())
    size = len(data) // volume.RECORD_AREAS
    index = volume.record_area_index(6, provisional=True)
    body = areas.read(data[index * size : (index + 1) * size])
    assert body is not None
    provisional = agent.folder / "provisional"
    provisional.write_bytes(body)
    first = orders[0]
    orders[1] = wire.RestoreOrder(
        source=RestoreSource.MEMORY, step=6, attempt=1, files=first.files, chunks_path=first.chunks_path,
        record=wire.RestoreFile(path=str(provisional), blocks=(), nbytes=0), shared_record=first.record,
    )  # fmt: skip
    agent.restore = orders
    agent.start(train, "9", world=2, attempt=2)
    for rank in range(2):
        assert agent.wait_for(wire.Finished, rank=rank).step == 9
    assert agent.all_of(wire.RankNotice) == []


@pytest.mark.slow
def test_without_a_record_a_rank_is_seeded_anew_and_says_so(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "6", world=2)
    for rank in range(2):
        agent.wait_for(wire.Finished, rank=rank)
        agent.wait_exit(rank)
    first = agent.restore_order(6, 0)
    orders = {0: first}
    orders[1] = wire.RestoreOrder(
        source=RestoreSource.MEMORY, step=6, attempt=1, files=first.files, chunks_path=first.chunks_path,
        record=None, shared_record=first.record,
    )  # fmt: skip
    agent.restore = orders
    agent.start(train, "8", world=2, attempt=2)
    notice = agent.wait_for(wire.RankNotice, rank=1)
    assert notice.code == "reseeded" and not notice.fatal and "rank 1" in notice.text
    assert agent.wait_for(wire.Finished, rank=1).step == 8


@pytest.mark.slow
def test_a_state_of_another_model_is_refused_with_what_differs(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.start(script(tmp_path / "one.py", TRAIN), "5")
    agent.wait_for(wire.Finished)
    agent.wait_exit()
    agent.restore = {0: agent.restore_order(5, 0)}
    other = TRAIN.replace("Linear(50, 20))", "Linear(50, 30), torch.nn.Linear(30, 20))")
    agent.start(script(tmp_path / "other.py", other), "9", attempt=2)
    notice = agent.wait_for(wire.RankNotice)
    assert notice.code == "wrong-model" and notice.fatal
    assert "model.3.weight" in notice.text
    assert "model.2.weight is float32[20, 50] there and float32[30, 50] here" in notice.text
    assert agent.wait_exit() == 1


@pytest.mark.slow
def test_a_damaged_part_is_never_restored(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "5")
    agent.wait_for(wire.Finished)
    agent.wait_exit()
    order = agent.restore_order(5, 0)
    path = pathlib.Path(order.files[0].path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    agent.restore = {0: order}
    agent.start(train, "9", attempt=2)
    notice = agent.wait_for(wire.RankNotice)
    assert notice.code == "restore-failed" and "block 0 is damaged" in notice.text
    assert agent.wait_exit() == 1


@pytest.mark.slow
def test_state_that_cannot_be_saved_is_named(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    code = """
        import torch
        from lastwords import Checkpointer
        class Odd:
            def state_dict(self): return {"inner": {"callback": print}}
            def load_state_dict(self, state): pass
        list(Checkpointer(model=torch.nn.Linear(1, 1), odd=Odd()).steps(3))
        """
    agent.start(script(tmp_path / "odd.py", code))
    notice = agent.wait_for(wire.RankNotice)
    assert notice.fatal and "objects.odd.inner.callback" in notice.text
    assert agent.wait_exit() == 1


@pytest.mark.slow
def test_ranks_that_start_with_different_weights_are_found_out(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "100000", world=2, UNEQUAL="1", PAUSE="0.05")
    notice = agent.wait_for(wire.RankNotice)
    assert notice.code == "replicas-differ" and notice.fatal and "is not the same on ranks 0 and 1" in notice.text


@pytest.mark.slow
def test_the_control_block_tells_how_it_goes(agent: FakeAgent, train: pathlib.Path) -> None:
    agent.start(train, "100000")
    agent.wait_for(wire.SnapshotReady, lambda m: m.step >= 5)
    block = memoryview((agent.folder / volume.control(0)).read_bytes())
    assert control.is_valid(block) and control.get_phase(block).name == "training"  # type: ignore[union-attr]
    for word in (Word.STEP_NS, Word.FIRST_STEP_NS, Word.RESTORED_NS, Word.LAST_COPY_NS, Word.SNAPSHOTS, Word.LOSS_BITS):
        assert control.get(block, word) > 0, word.name
    assert control.get(block, Word.FLOOR_STEP) - 1 >= 4


@pytest.mark.slow
def test_killed_windows_are_logged(agent: FakeAgent, train: pathlib.Path, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "windows"
    agent.start(train, "20", LASTWORDS_WINDOWS_LOG=str(log))
    agent.wait_for(wire.Finished)
    rows = [line.split() for line in log.read_text().splitlines()]
    assert all(len(row) == 5 and row[2] == "0" for row in rows)
    assert {row[3] for row in rows} == {"restore", "update", "boundary", "snapshot_copy"}
    assert (
        sum(row[3:] == ["update", "begin"] for row in rows) == sum(row[3:] == ["update", "end"] for row in rows) == 20
    )
