"""SIGKILL of a rank to the first new step, by phase: `torchrun --max-restarts` beside `lastwords run`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from tests.bench import report

SCRIPT = pathlib.Path(__file__).with_name("restart_script.py")
PHASES = ("began", "imported", "group", "model", "restored", "first new step")
STEPS = 100_000
LOST_AT_STEP = 105
"""In the middle between two of the saves, which are ten steps apart."""
RUN_SECONDS = 30
"""Faults strike jobs that have been running for a while: whatever a launcher prepares for them is prepared by then."""


Rows = list[dict[str, object]]


def events(folder: pathlib.Path) -> Rows:
    """All events of all ranks, in order of time."""
    rows = []
    for path in folder.glob("events-*.jsonl"):
        rows += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(rows, key=lambda row: float(row["time"]))


def command(mode: str, folder: pathlib.Path, state_mb: float, *options: str) -> list[str]:
    """The command line of one run with 2 x 2 ranks; of torchrun with one agent, or with `options` for several."""
    script = [str(SCRIPT), f"--mode={mode}", f"--state-mb={state_mb}", f"--steps={STEPS}", f"--folder={folder}"]
    if mode == "torch":
        options = options or ("--nproc-per-node=4", "--master-port=0", "--rdzv-endpoint=127.0.0.1:0")
        return [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", "--rdzv-backend=c10d",
                *options, *script]  # fmt: skip
    run = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--workers=2", "--procs=2"]
    return [*run, f"--dir={folder / 'job'}", "--save-every=10steps", *options, "--", sys.executable, *script]


@contextlib.contextmanager
def started(folder: pathlib.Path, *commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands as running processes, each the leader of a session; ended afterwards."""
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("ab") as output:
        try:
            for words in commands:
                processes.append(
                    subprocess.Popen(
                        words, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                )
            yield processes
        finally:
            for process in processes:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def measure(mode: str, state_mb: float, deadline_seconds: float = 240) -> dict[str, float]:
    """
    Kill rank 1 half a minute after its first step.

    Returns seconds from the kill to each phase of the slowest rank, and the steps lost.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-"))
    try:
        with started(folder, command(mode, folder, state_mb)) as (process,):
            return _kill_and_wait(process, folder, deadline_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_lost_worker(mode: str, state_mb: float, deadline_seconds: float = 240) -> dict[str, float]:
    """
    A worker with two of the four ranks ends with all its processes, and what it kept in memory is gone.

    It is started again at once. Times count from its last sign of life.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-"))
    try:
        if mode == "lastwords":
            fault = f"--inject=lose worker=1 at-step={LOST_AT_STEP}"
            with started(folder, command(mode, folder, state_mb, fault)):
                pid = _wait_for_step(folder, 3, 0, deadline_seconds)
                return _wait_for_phases(folder, lambda rows: _last_sign(rows, pid), deadline_seconds)
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"--rdzv-endpoint=127.0.0.1:{server.getsockname()[1]}"
        words = command(mode, folder, state_mb, "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=bench", endpoint)
        with started(folder, words, words) as (first, second):
            _wait_for_step(folder, 3, LOST_AT_STEP, deadline_seconds)
            # Which of the two agents has ranks 2 and 3 is theirs to agree.
            ranks = {int(str(row["rank"])): int(str(row["pid"])) for row in events(folder)}
            lost = next(agent for agent in (first, second) if _parent(ranks[3]) == agent.pid)
            if lost is first:
                raise RuntimeError("the agent that hosts the rendezvous has ranks 2 and 3; measure again")
            killed_at = time.time()
            for pid in (lost.pid, ranks[2], ranks[3]):
                os.kill(pid, signal.SIGKILL)
            with started(folder, words):
                return _wait_for_phases(folder, lambda _: killed_at, deadline_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parent(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_for_step(folder: pathlib.Path, rank: int, step: int, deadline_seconds: float) -> int:
    """The process of `rank` that has made `step` or a later one."""
    deadline = time.time() + deadline_seconds
    while time.time() < deadline:
        made = [row for row in events(folder) if row["event"] == "step" and row["rank"] == rank]
        if made and int(str(made[-1]["step"])) >= step:
            return int(str(made[-1]["pid"]))
        time.sleep(0.02)
    raise RuntimeError(f"no step {step} within {deadline_seconds} s:\n{(folder / 'output').read_text()[-3000:]}")


def _last_sign(rows: Rows, pid: int) -> float:
    return max(float(str(row["time"])) for row in rows if row["pid"] == pid)


def _wait_for_phases(
    folder: pathlib.Path, killed_at: Callable[[Rows], float], deadline_seconds: float
) -> dict[str, float]:
    deadline = time.time() + deadline_seconds
    while time.time() < deadline:
        rows = events(folder)
        if result := _phases(rows, killed_at(rows)):
            return result
        time.sleep(0.02)
    raise RuntimeError(f"no new step within {deadline_seconds} s:\n{(folder / 'output').read_text()[-3000:]}")


def _kill_and_wait(process: subprocess.Popen[bytes], folder: pathlib.Path, deadline_seconds: float) -> dict[str, float]:
    deadline = time.time() + deadline_seconds
    while time.time() < deadline and process.poll() is None:
        made = [row for row in events(folder) if row["event"] == "step" and row["rank"] == 1]
        # In the middle between two of the saves, which are ten steps apart.
        if made and float(str(made[0]["time"])) + RUN_SECONDS < time.time() and int(str(made[-1]["step"])) % 10 == 5:
            killed_at = time.time()
            os.kill(int(str(made[-1]["pid"])), signal.SIGKILL)
            return _wait_for_phases(folder, lambda _, at=killed_at: at, deadline_seconds)
        time.sleep(0.02)
    raise RuntimeError(f"it did not train within {deadline_seconds} s:\n{(folder / 'output').read_text()[-3000:]}")


def _phases(rows: Rows, killed_at: float) -> dict[str, float]:
    """Seconds from the kill to each phase; empty until all four ranks made a step in new processes."""
    ended = {row["pid"] for row in rows if float(row["time"]) <= killed_at}  # type: ignore[arg-type]
    fresh = [row for row in rows if row["pid"] not in ended]
    first_steps: dict[object, float] = {}
    for row in fresh:
        if row["event"] == "step":
            first_steps.setdefault(row["rank"], float(row["time"]))  # type: ignore[arg-type]
    if len(first_steps) < 4:
        return {}
    result = {}
    for phase in PHASES[:-1]:
        result[phase] = max(float(row["time"]) for row in fresh if row["event"] == phase) - killed_at  # type: ignore[arg-type]
    result["first new step"] = max(first_steps.values()) - killed_at
    old_steps = [int(row["step"]) for row in rows if row["event"] == "step" and row["pid"] in ended]  # type: ignore[call-overload]
    restored = [int(row["step"]) for row in fresh if row["event"] == "restored"]  # type: ignore[call-overload]
    # the newest step that any rank finished before the kill, against the step at which all go on
    result["steps lost"] = float(max(0, max(old_steps) + 1 - min(restored)))
    return result


def _rows(
    what: str, ours: Sequence[dict[str, float]], torch: Sequence[dict[str, float]], goal: float
) -> Iterator[report.Row]:
    """One row per phase, and those with goals."""

    def median(runs: Sequence[dict[str, float]], phase: str) -> float:
        return report.median([one[phase] for one in runs])

    for phase in PHASES[:-1]:
        yield report.information(f"{what} to {phase}", median(ours, phase), "s", "torchrun", median(torch, phase))
    new = PHASES[-1]
    yield report.faster(f"{what} to {new}", median(ours, new), "s", "torchrun", median(torch, new), goal)
    lost = max(one["steps lost"] for one in ours)
    yield report.Row(
        name=f"{what}: steps lost",
        value=lost,
        unit="",
        baseline="torchrun",
        baseline_value=max(one["steps lost"] for one in torch),
        goal="0",
        met=lost == 0,
    )


def main(quick: bool = False) -> None:
    """All rows of this topic."""
    rows: list[report.Row] = []
    for state_mb, repeats, goal in [(50, 1, 20)] if quick else [(50, 3, 20), (1000, 2, 5)]:
        ours, torch = [], []
        for _ in range(repeats):  # in turns, since the machine is shared
            ours.append(measure("lastwords", state_mb))
            torch.append(measure("torch", state_mb))
        rows += _rows(f"{state_mb} MB, kill", ours, torch, goal)
    if not quick:
        lost = [[measure_lost_worker(mode, 50)] for mode in ("lastwords", "torch")]
        rows += _rows("50 MB, lost worker", lost[0], lost[1], 5)
    report.publish("restart", rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
