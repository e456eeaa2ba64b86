"""`lastwords run` with sharded layouts: a rank is killed, and the run equals the undisturbed one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = pathlib.Path(__file__).with_name("train_sharded.py")
STEPS = 40
EVERY = 5


def undisturbed(folder: pathlib.Path, mode: str) -> pathlib.Path:
    """By torchrun."""
    out = folder / "undisturbed.json"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={cases.WORLD}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(SCRIPT), *arguments(mode), f"--out={out}"]
    environment = os.environ | cases.ENVIRONMENT
    subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    return out


def arguments(mode: str) -> list[str]:
    """Of the script."""
    return [f"--mode={mode}", f"--steps={STEPS}", "--step-seconds=0.02"]


def start(run: cases.Run, mode: str, *options: str) -> None:
    """Two workers with two ranks each."""
    line = run.line(options, ())
    at = line.index("--")
    run.start_line([*line[: at + 1], sys.executable, str(SCRIPT), *arguments(mode), f"--out={run.out}"])


@pytest.mark.parametrize(("mode", "lost"), [("fsdp", range(1, EVERY + 1)), ("hsdp", range(1))])
def test_a_rank_is_killed(run: cases.Run, tmp_path: pathlib.Path, mode: str, lost: range) -> None:
    """
    fsdp: the rank's shards of the last step are gone with it, so the newest snapshot that all ranks have is restored.
    hsdp: the other worker has its shards too, and no step is lost.
    """
    start(run, mode, f"--save-every={EVERY}steps", "--inject=kill rank=3 at-step=23")
    assert run.wait(150) == 0, run.text()
    run.equals(undisturbed(tmp_path, mode))
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["source"], recovery["exact"]) == ("RankKilled", "memory", True)
    assert recovery["steps_lost"] in lost
