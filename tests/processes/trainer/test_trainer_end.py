"""The end of a rank's script: what the others still need stays, and nothing is copied twice."""

from __future__ import annotations

import pathlib

import pytest

from lastwords.protocol import wire
from lastwords.protocol.control import Word
from lastwords.protocol.snapshots import SnapshotPlan
from tests.processes.trainer.fake_agent import FakeAgent, script

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    from lastwords import Checkpointer
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in checkpointer.steps(int(sys.argv[1])):
        time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    if rank == 1:
        time.sleep(2)
        dist.distributed_c10d._get_default_store().add("late", 1)
        pathlib.Path(sys.argv[2]).write_text("done")
    """


def test_the_rank_that_hosts_the_store_leaves_last(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    agent.start(script(tmp_path / "train.py", SCRIPT), "20", str(done), world=2)
    assert [agent.wait_exit(rank) for rank in range(2)] == [0, 0], agent.log(1)
    assert done.read_text() == "done", agent.log(1)


def test_the_snapshot_of_a_planned_stop_is_the_final_state(agent: FakeAgent, tmp_path: pathlib.Path) -> None:
    agent.start(script(tmp_path / "train.py", SCRIPT), "100000", str(tmp_path / "done"), world=2)
    agent.wait_for(wire.Boundary, lambda m: m.step >= 3, rank=0)
    end = agent.word(Word.STEP) + 20
    for rank in range(2):
        agent.send(rank, wire.NewPlan(plan=SnapshotPlan(number=2, every_steps=5, from_step=1, stop_after=end)))
    for rank in range(2):
        assert agent.wait_for(wire.Finished, rank=rank).step == end
    ready = [(m.step, m.persist, m.persist_kind) for m in agent.all_of(wire.SnapshotReady) if m.step == end]
    assert ready == [(end, True, "last-words")] * 2
