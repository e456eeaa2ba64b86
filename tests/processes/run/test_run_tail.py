"""What a script does after its last step: it is neither cut off nor lost."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.processes.run import cases

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, sys, time
import torch
from lastwords import Checkpointer

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in checkpointer.steps(steps):
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    (folder / "step").write_text(str(step))
    time.sleep(0.02)
time.sleep(3)  # a last evaluation, longer than the last checkpoint takes
(folder / "exported").write_text(str(checkpointer.step))
sys.exit(0)
"""


@pytest.fixture
def run(run: cases.Run) -> cases.Run:
    """With the script in its folder."""
    (run.folder / "script.py").write_text(SCRIPT)
    return run


def _line(run: cases.Run, steps: int) -> list[str]:
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", "--workers=1", "--procs=1"]
    line += [f"--dir={run.job}", f"--memory-dir={run.memory}", "--save-every=10steps", "--"]
    return [*line, sys.executable, str(run.folder / "script.py"), str(run.folder), str(steps)]


def test_a_job_is_complete_only_when_its_script_has_ended(run: cases.Run) -> None:
    run.start_line(_line(run, 30))
    assert run.wait() == 0, run.text()
    assert (run.folder / "exported").read_text() == "30"


def test_after_ctrl_c_the_script_may_end_by_itself(run: cases.Run) -> None:
    process = run.start_line(_line(run, 100_000))
    run.until(lambda: (run.folder / "step").exists() and int((run.folder / "step").read_text() or 0) > 20)
    process.send_signal(signal.SIGINT)
    run.wait()
    assert (run.folder / "exported").exists(), run.text()
    assert run.status()["state"] == "Suspended"
    assert int((run.folder / "exported").read_text()) == run.status()["newest_checkpoint"]
