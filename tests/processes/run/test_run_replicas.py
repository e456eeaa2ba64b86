"""State of which no other worker holds a copy: the loss of a worker goes back to the newest replicated snapshot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 40
SCRIPT = """
import hashlib, json, os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lastwords import Checkpointer

out, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in checkpointer.steps(steps):
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for name, value in sorted(model.state_dict().items()):
    digest.update(value.full_tensor().numpy().tobytes())
if rank == 0:
    out.write_text(json.dumps({"sha256": digest.hexdigest(), "steps": checkpointer.step}))
dist.destroy_process_group()
"""


@pytest.fixture
def run(run: cases.Run) -> cases.Run:
    """With the script in its folder."""
    (run.folder / "script.py").write_text(SCRIPT)
    return run


def _line(run: cases.Run, *options: str) -> list[str]:
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job"]
    line += [f"--workers={cases.WORKERS}", f"--procs={cases.PROCS}", f"--dir={run.job}"]
    line += [f"--memory-dir={run.memory}", "--save-every=4steps", *options, "--"]
    return [*line, sys.executable, str(run.folder / "script.py"), str(run.out), str(STEPS)]


def _undisturbed(run: cases.Run) -> object:
    out = run.folder / "undisturbed.json"
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={cases.WORLD}"]
    line += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(run.folder / "script.py"), str(out), str(STEPS)]
    subprocess.run(line, check=True, cwd=run.folder, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def test_a_lost_worker_is_restored_from_replicas_in_memory(run: cases.Run) -> None:
    # A storage that holds nothing newer than the first save: only memory can give the step.
    run.start_line(_line(run, "--replicas=1", "--inject=lose worker=1 at-step=22"))
    assert run.wait() == 0, run.text()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["source"], recovery["exact"]) == ("WorkerLost", "memory", True), run.text()
    assert 0 < recovery["steps_lost"] <= 8
    assert json.loads(run.out.read_text()) == _undisturbed(run)
    run.left_nothing()
