"""`--resume-from`: a new job goes on from another one's checkpoint, to the last bit, and tells when there is none."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = """
import hashlib, json, os, sys
import torch
from lastwords import Checkpointer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Dropout(0.5), torch.nn.Linear(20, 2))
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = Checkpointer(model=model, optimizer=optimizer)
seen = []
for step in checkpointer.steps(int(sys.argv[2])):
    seen.append(step)
    optimizer.zero_grad()
    model(torch.randn(4, 20)).square().sum().backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
json.dump({"first": seen[0], "sha256": hashlib.sha256(weights).hexdigest()}, open(sys.argv[1], "w"))
"""


def train(run: cases.Run, name: str, steps: int, *options: str) -> tuple[int, Any]:
    """One job of one rank; its exit code and its result."""
    out = run.folder / f"{name}.json"
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", f"--name={name}"]
    line += [f"--dir={run.folder / name}", f"--memory-dir={run.memory}", f"--storage={run.folder / 'storage'}"]
    run.job = run.folder / name
    run.start_line([*line, *options, "--", sys.executable, "train.py", str(out), str(steps)])
    code = run.wait()
    return code, json.loads(out.read_text()) if out.exists() else None


def test_a_new_job_goes_on_from_another_ones_checkpoint(run: cases.Run) -> None:
    (run.folder / "train.py").write_text(SCRIPT)
    assert train(run, "whole", 24)[0] == 0, run.text()
    assert train(run, "first", 12)[0] == 0, run.text()
    code, result = train(run, "second", 24, f"--resume-from={run.folder / 'storage/default/first'}")
    assert code == 0, run.text()
    assert result["first"] == 12
    assert result["sha256"] == json.loads((run.folder / "whole.json").read_text())["sha256"]
    assert "the job begins with step-000000000012-a1 of " in run.console.read_text()
    code, _ = train(run, "third", 24, f"--resume-from={run.folder / 'storage/default/nobody'}")
    assert code != 0
    assert "no committed checkpoint of a job is in" in run.console.read_text()
