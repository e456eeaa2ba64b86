"""
O-33, O-36: storage that is slow, stalled, full, read-only, stale, failing or gone, under a job that trains.

Training keeps its pace, the checkpoint that is there stays, the user is told, and saving goes on when storage is back.
"""

from __future__ import annotations

import pathlib
import shutil
import signal
import sys
import time

import pytest

from lastwords.storage.checkpoints import JobCheckpoints
from tests.processes.run import cases
from tests.processes.storage.bad_storage import Switch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from lastwords import Checkpointer

torch.set_num_threads(1)
dist.init_process_group("gloo")
net = torch.nn.Linear(200, 200)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters())
checkpointer = Checkpointer(model=net, optimizer=optimizer)
steps = os.open(f"steps.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in checkpointer.steps(1_000_000):
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
    os.write(steps, b".")
dist.destroy_process_group()
"""
WINDOW_SECONDS = 1.2


class Job:
    """The run, and what it shows."""

    def __init__(self, run: cases.Run) -> None:
        self.run = run
        self.storage = run.folder / "storage"

    def passed(self) -> int:
        """Boundaries that all ranks have passed within a while."""
        before = self._boundaries()
        time.sleep(WINDOW_SECONDS)
        return self._boundaries() - before

    def _boundaries(self) -> int:
        return min((self.run.folder / f"steps.{rank}").stat().st_size for rank in (0, 1))

    def health(self) -> tuple[bool, str]:
        """What the job's condition says of saving."""
        rows = [row for row in self.run.status().get("conditions", []) if row["type"] == "CheckpointHealthy"]
        return (rows[0]["status"], rows[0]["message"]) if rows else (True, "")

    def newest(self) -> int:
        """Newest checkpoint."""
        return self.run.status().get("newest_checkpoint") or 0

    def until_saved_again(self) -> None:
        """Healthy, and newer than now."""
        newest = self.newest()
        self.run.until(lambda: self.newest() > newest and self.health()[0])


@pytest.fixture
def switch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Switch:
    one = Switch(tmp_path, cases.ROOT)
    for name, value in one.variables.items():
        monkeypatch.setenv(name, value)
    return one


@pytest.fixture
def job(run: cases.Run, switch: Switch) -> Job:
    (run.folder / "train.py").write_text(SCRIPT)
    one = Job(run)
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", "--workers=2"]
    line += [f"--dir={run.job}", f"--memory-dir={run.memory}", f"--storage={one.storage}", "--save-every=10steps"]
    run.start_line([*line, "--", sys.executable, "train.py"])
    run.until(lambda: one.newest() > 0)
    return one


def test_O_33_O_36_whatever_storage_does_training_goes_at_its_pace_and_saving_comes_back(
    job: Job, switch: Switch
) -> None:
    aside = job.storage.with_name("aside")
    sentences = {
        "stalled": "storage did not answer within 4 seconds",
        "full": "the file system is full: free some space",
        "read-only": "read-only",
        "stale": "stale handle",
        "other": "other",
        "gone": "is not there (any more)",
    }
    for fault, sentence in sentences.items():
        job.until_saved_again()
        before, kept = job.passed(), job.newest()
        switch.set(fault)
        if fault == "gone":
            job.storage.rename(aside)
        job.run.until(lambda s=sentence: not job.health()[0] and s in job.health()[1])
        assert "Training goes on" in job.health()[1]
        during = job.passed()
        assert during > before / 2, f"{fault}: {during} boundaries, {before} before"
        if fault == "gone":
            shutil.rmtree(job.storage, ignore_errors=True)
            aside.rename(job.storage)
        checkpoints = JobCheckpoints.at(str(job.storage), "default", "job")
        newest = checkpoints.list_checkpoints()[-1]
        assert newest.id.step >= kept
        assert checkpoints.verify(newest.id) == []
        switch.set("")
    job.until_saved_again()
    finish(job)


def test_O_36_slow_storage_costs_training_nothing(job: Job, switch: Switch) -> None:
    before = job.passed()
    switch.set("slow")
    time.sleep(WINDOW_SECONDS)
    newest = job.newest()
    during = job.passed()
    assert during > before / 2, f"{during} boundaries, {before} before"
    job.run.until(lambda: job.newest() > newest)
    assert job.health()[0], "slow is no failure"
    switch.set("")
    finish(job)


def finish(job: Job) -> None:
    """Stopped by its user, with the last step saved, in the attempt it began with."""
    assert job.run.process is not None
    job.run.process.send_signal(signal.SIGINT)
    assert job.run.wait(60) == 130, job.run.text()
    assert job.run.status()["attempt"] == 1
    assert job.newest() == job.run.status()["progress_step"]
    job.run.left_nothing()
