"""Runs of the reference model under `lastwords run`, and the undisturbed run that they must equal."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lastwords_operator.local import processes
from lastwords_operator.local.folder import JobFolder

ROOT = pathlib.Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "tests" / "reference" / "train_reference.py"
WORKERS, PROCS = 2, 2
WORLD = WORKERS * PROCS
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
STEPS = 60
SCRIPT = (f"--steps={STEPS}", "--loader-workers=1", "--step-seconds=0.02", "--foretold")
"""Without `--foretold` a rank that dies between its last gradients and its boundary costs a snapshot interval."""


def undisturbed(folder: pathlib.Path, script: Sequence[str] = SCRIPT) -> pathlib.Path:
    """Run the reference model by torchrun, without Lastwords; its result file."""
    out = folder / "undisturbed.json"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(REFERENCE), *script, f"--out={out}"]
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT, cwd=folder, stdout=subprocess.DEVNULL)
    return out


def losses(out: pathlib.Path, world: int = WORLD) -> dict[tuple[int, int], str]:
    """Loss by (rank, step); a step that was done twice must have had the same loss."""
    found: dict[tuple[int, int], str] = {}
    for rank in range(world):
        for line in out.with_name(f"{out.name}.rank{rank}.jsonl").read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote the line; the step is done again
            key = (rank, row["step"])
            assert found.setdefault(key, row["loss"]) == row["loss"], f"step {key} had two different losses"
    return found


class Run:
    """One job under `lastwords run`; it may be started more than once."""

    def __init__(self, folder: pathlib.Path, memory: pathlib.Path) -> None:
        self.folder, self.memory = folder, memory
        self.job = folder / "job"
        self.out = folder / "out.json"
        self.console = folder / "console.log"
        self.process: subprocess.Popen[bytes] | None = None

    def line(self, options: Sequence[str] = (), script: Sequence[str] = SCRIPT) -> list[str]:
        """The command line."""
        line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job"]
        line += [f"--workers={WORKERS}", f"--procs={PROCS}", f"--dir={self.job}", f"--memory-dir={self.memory}"]
        line += ["--save-every=10steps", *options, "--"]
        return [*line, sys.executable, str(REFERENCE), *script, f"--out={self.out}"]

    def start(self, options: Sequence[str] = (), script: Sequence[str] = SCRIPT) -> subprocess.Popen[bytes]:
        """Start (again)."""
        return self.start_line(self.line(options, script))

    def start_line(self, line: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start with a command line of one's own."""
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                line,
                stdout=console,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
        return self.process

    def wait(self, seconds: float = 100) -> int:
        """Exit code."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds} s\n{self.text()}") from None

    def text(self) -> str:
        """All that was printed, and the agents' logs, for the message of a failed test."""
        logs = sorted((self.job / "logs").glob("agent-*.log"))
        return "\n".join(
            [self.console.read_text()[-8000:], *(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)]
        )

    def status(self) -> dict[str, Any]:
        """The status file's content; empty before there is one."""
        try:
            return dict(json.loads((self.job / "status.json").read_text())["status"])
        except FileNotFoundError:
            return {}

    def uid(self) -> str:
        """Of the job."""
        return str(json.loads((self.job / "job.json").read_text())["uid"])

    def steps(self) -> dict[int, int]:
        """Newest step of which each rank has written the loss."""
        found = {}
        for path in self.folder.glob("out.json.rank*.jsonl"):
            rows = [line for line in path.read_text().splitlines() if line.endswith("}")]
            if rows:
                found[int(path.name.split("rank")[1].split(".")[0])] = json.loads(rows[-1])["step"]
        return found

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait, while the run goes on."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition did not come about\n{self.text()}"
            assert self.process is None or self.process.poll() is None, f"the run ended\n{self.text()}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        """Until all ranks have passed the step."""
        self.until(lambda: len(found := self.steps()) == WORLD and min(found.values()) >= step)

    def containers(self, module: str) -> list[int]:
        """Processes of `python -m module` of this job."""
        return [found.pid for found in processes.find(self.uid()) if found.is_container(module)]

    def clean_up(self) -> None:
        """End what a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if (self.job / "job.json").exists():
            processes.kill_all(self.uid())
        JobFolder(self.job).remove_runtime()

    # --- what must hold -----------------------------------------------------------------------------

    def equals(self, undisturbed: pathlib.Path) -> None:
        """The same loss in each step, and the same bytes at the end."""
        mine, theirs = losses(self.out), losses(undisturbed)
        different = sorted((step, rank) for (rank, step) in theirs if mine.get((rank, step)) != theirs[rank, step])
        assert not different, f"(step, rank) {different[:4]} differ\n{self.text()}"
        assert set(mine) == set(theirs)
        assert json.loads(self.out.read_text()) == json.loads(undisturbed.read_text())

    def left_nothing(self) -> None:
        """No process, no memory, no socket."""
        assert processes.find(self.uid()) == []
        assert [str(path) for path in self.memory.rglob("*")] == []
        runtime = pathlib.Path((self.job / "runtime").read_text().strip())
        assert not runtime.exists()
