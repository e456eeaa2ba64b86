"""A script that unfreezes parameters and adds a parameter group on its way, and is killed before and after that."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lastwords.protocol import areas, pieces, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.pieces import Topology
from lastwords.protocol.snapshots import SnapshotPlan
from lastwords.trainer import hoststate, layouts
from tests.processes.trainer import fake_agent
from tests.processes.trainer.fake_agent import FakeAgent, script

pytestmark = pytest.mark.slow

GROW_AT = 8
SCRIPT = """
    import json, os, sys, time
    import torch
    from lastwords import Checkpointer
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in checkpointer.steps(20):
        time.sleep(0.02)
        if step == 8:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})
        if step == int(os.environ.get("WAIT_AT", "-1")):
            time.sleep(600)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    weights = [value.tolist() for value in model.state_dict().values()]
    moments = [value["exp_avg"].tolist() for value in optimizer.state.values()]
    print("RESULT", json.dumps([weights, moments, [group["lr"] for group in optimizer.param_groups]]), flush=True)
    """


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lastwords-test-", dir="/dev/shm"))
    with fake_agent.agent(folder / "volume") as fake:
        fake.plan = SnapshotPlan(number=1, every_steps=1, persist_every=0, from_step=1)
        yield fake
    shutil.rmtree(folder, ignore_errors=True)


def result(agent: FakeAgent) -> Any:
    agent.wait_for(wire.Finished)
    assert agent.wait_exit() == 0, agent.log()
    (line,) = [line for line in agent.log().splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


def killed_at(agent: FakeAgent, path: pathlib.Path, step: int, attempt: int) -> None:
    """Kill the rank once its snapshot of `step` is whole; the next attempt restores that."""
    agent.start(path, attempt=attempt, WAIT_AT=str(step))
    agent.wait_for(wire.SnapshotReady, lambda m: m.step == step)
    agent.processes[0].kill()
    agent.processes[0].wait()
    agent.restore = {0: agent.restore_order(step, 0, attempt)}


def test_groups_and_unfrozen_parameters_survive_kills(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    path = script(tmp_path / "train.py", SCRIPT)
    agent.start(path)
    undisturbed = result(agent)
    killed_at(agent, path, GROW_AT - 2, attempt=2)
    before = layouts.known_table(str(agent.folder))
    killed_at(agent, path, GROW_AT + 3, attempt=3)
    after = layouts.known_table(str(agent.folder))
    assert before is not None and after is not None
    assert len(after.chunks) > len(before.chunks) and after.generation > before.generation
    agent.start(path, attempt=4)
    assert result(agent) == undisturbed
    assert agent.all_of(wire.RankNotice) == []


SHARDED = """
    import os, time
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from lastwords import Checkpointer
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 6)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in checkpointer.steps(1000):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if step == 5:
            time.sleep(600)
        optimizer.step()
        optimizer.zero_grad()
    """


def test_a_sharded_rank_has_the_record_of_the_coming_boundary_once_its_backward_pass_is_over(
    agent: FakeAgent, tmp_path: pathlib.Path
) -> None:
    """The other ranks may pass that boundary without it: autograd shows its shards nothing, its outputs do."""
    agent.start(script(tmp_path / "train.py", SHARDED), world=2)
    agent.wait_for(wire.Boundary, lambda m: m.step == 5, rank=0)
    agent.wait_for(wire.SnapshotReady, lambda m: m.step == 5, rank=0)
    agent.wait_for(wire.SnapshotReady, lambda m: m.step == 5, rank=1)
    deadline = time.monotonic() + 30
    for rank in range(2):
        while (head := coming_record(agent, rank, 6).head).step != 6:
            assert time.monotonic() < deadline, head
            time.sleep(0.02)
        assert head.exact
        assert agent.word(Word.STEP, rank) - 1 == 5
    table = layouts.known_table(str(agent.folder))
    assert table is not None and table.topology == Topology(workers=1, processes_per_worker=2)
    assert [piece.holders for piece in table.pieces if not piece.holders & (piece.holders - 1)] == [1, 2]
    assert pieces.summarise(table).pieces[0].chunks == 2


def coming_record(agent: FakeAgent, rank: int, step: int) -> hoststate.Record:
    data = memoryview((agent.folder / volume.records(rank)).read_bytes())
    size = len(data) // volume.RECORD_AREAS
    index = volume.record_area_index(step, provisional=True)
    body = areas.read(data[index * size : (index + 1) * size])
    assert body is not None
    return hoststate.parse_record(body)
