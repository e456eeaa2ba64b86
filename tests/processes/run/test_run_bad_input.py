"""Bad input to a whole run: each is a clear sentence that says what to do, and nothing is lost or left behind."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODEL = """
import os, torch
from lastwords import Checkpointer
torch.manual_seed(0)
model = torch.nn.Linear(8, int(os.environ.get("WIDTH", "4")))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
TRAIN = """
for step in checkpointer.steps(int(os.environ.get("STEPS", "20"))):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
"""


def start(run: cases.Run, script: str, *options: str, name: str = "script.py") -> None:
    """One worker with one rank runs the script."""
    path = run.folder / name
    path.write_text(textwrap.dedent(script))
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", f"--dir={run.job}"]
    run.start_line([*line, f"--memory-dir={run.memory}", *options, "--", sys.executable, str(path)])


def test_a_command_that_does_not_exist(run: cases.Run) -> None:
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", f"--dir={run.job}"]
    run.start_line([*line, f"--memory-dir={run.memory}", "--", "pythom", "train.py"])
    assert run.wait(60) == 1, run.text()
    assert "pythom" in run.status()["message"]
    run.left_nothing()


def test_a_script_that_does_not_exist(run: cases.Run) -> None:
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", f"--dir={run.job}"]
    run.start_line([*line, f"--memory-dir={run.memory}", "--", sys.executable, "absent.py"])
    assert run.wait(60) not in (0, 130), run.text()
    assert "absent.py" in run.console.read_text()
    run.left_nothing()


def test_a_script_that_fails_before_its_first_step_is_not_restarted_for_ever(run: cases.Run) -> None:
    start(run, MODEL + "checkpointer = Checkpointer(model=model)\nraise ValueError('the learning rate is missing')\n")
    assert run.wait(90) not in (0, 130), run.text()
    text = run.console.read_text()
    assert "ValueError: the learning rate is missing" in text
    assert "script.py" in text
    assert "the learning rate is missing" in run.status()["recoveries"][-1]["traceback"]
    assert run.status()["state"] == "Failed"
    assert run.status()["attempt"] <= 3
    run.left_nothing()


def test_an_exit_code_of_the_script_is_the_jobs(run: cases.Run) -> None:
    start(run, "import sys; sys.exit(7)", "--max-restarts=0")
    assert run.wait(90) == 7, run.text()
    run.left_nothing()


def test_state_that_cannot_be_saved_is_named(run: cases.Run) -> None:
    script = """
    class Strange:
        def state_dict(self): return {"callback": lambda: 1}
        def load_state_dict(self, state): pass
    checkpointer = Checkpointer(model=model, optimizer=optimizer, strange=Strange())
    """
    start(run, MODEL + textwrap.dedent(script) + TRAIN)
    assert run.wait(90) not in (0, 130), run.text()
    assert "strange" in run.status()["message"]
    assert "callback" in run.status()["message"]
    assert run.status()["attempt"] == 1, "restarting does not help"
    run.left_nothing()


def test_a_checkpoint_of_another_model_says_what_differs(run: cases.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        MODEL
        + "checkpointer = Checkpointer(model=model, optimizer=optimizer)\n"
        + TRAIN.replace("optimizer.step()", "optimizer.step(); import time; time.sleep(0.05)")
    )
    monkeypatch.setenv("STEPS", "100000")
    start(run, script, "--save-every=5steps")
    run.until(lambda: (run.status().get("newest_checkpoint") or 0) >= 5)
    assert run.process is not None
    run.process.terminate()
    assert run.wait(60) == 130, run.text()
    saved = sorted(path.name for path in (run.job / "checkpoints").rglob("step-*"))
    monkeypatch.setenv("WIDTH", "5")
    start(run, script, "--save-every=5steps")
    assert run.wait(90) not in (0, 130), run.text()
    assert "weight" in run.status()["message"]
    assert "[5, 8]" in run.status()["message"] and "[4, 8]" in run.status()["message"]
    assert sorted(path.name for path in (run.job / "checkpoints").rglob("step-*")) == saved
    run.left_nothing()


def test_o_33_storage_that_breaks_is_told_and_training_goes_on(run: cases.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        MODEL
        + "checkpointer = Checkpointer(model=model, optimizer=optimizer)\n"
        + TRAIN.replace("optimizer.step()", "optimizer.step(); import time; time.sleep(0.05)")
    )
    monkeypatch.setenv("STEPS", "200")
    start(run, script, "--save-every=5steps")
    run.until(lambda: (run.status().get("newest_checkpoint") or 0) >= 5)
    storage, aside = run.job / "checkpoints", run.job / "aside"
    storage.rename(aside)
    storage.write_text("not a folder any more")
    run.until(lambda: "SaveFailed" in run.console.read_text())
    storage.unlink()
    aside.rename(storage)
    assert run.wait(90) == 0, run.text()
    assert run.status()["newest_checkpoint"] == 200
    assert run.status()["attempt"] == 1
    run.left_nothing()


def test_o_35_too_little_memory_for_the_state_is_told_with_figures(
    run: cases.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTWORDS_MEMORY_LIMIT_BYTES", str(2 * 1024 * 1024))
    monkeypatch.setenv("WIDTH", str(500_000))
    start(run, MODEL + "checkpointer = Checkpointer(model=model, optimizer=optimizer)\n" + TRAIN)
    assert run.wait(90) not in (0, 130), run.text()
    message = run.status()["message"]
    assert "memory" in message
    assert any(character.isdigit() for character in message)
    run.left_nothing()


def test_unprotected_scripts_run_to_their_end_with_one_line(run: cases.Run) -> None:
    start(run, "import os; print('rank', os.environ['RANK'])")
    assert run.wait(60) == 0, run.text()
    assert "had used no Checkpointer" in run.console.read_text()
    run.left_nothing()


def test_a_job_file(run: cases.Run) -> None:
    (run.folder / "script.py").write_text(MODEL + "checkpointer = Checkpointer(model=model)\n" + TRAIN)
    (run.folder / "job.yaml").write_text(
        f"""
apiVersion: lastwords.dev/v1alpha1
kind: FaultTolerantJob
metadata: {{name: from-a-file}}
spec:
  workers:
    replicas: 1
    processesPerWorker: 1
    template:
      spec:
        containers:
          - {{name: trainer, command: [{sys.executable}, script.py], env: [{{name: STEPS, value: "7"}}]}}
  checkpoint:
    storage: {{uri: "file://{run.folder}/storage"}}
"""
    )
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "-f", "job.yaml", f"--dir={run.job}"]
    run.start_line([*line, f"--memory-dir={run.memory}"])
    assert run.wait(60) == 0, run.text()
    assert run.status()["progress_step"] == 7
    assert list((run.folder / "storage" / "default" / "from-a-file").glob("step-000000000007-*/manifest.json"))
