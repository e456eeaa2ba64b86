"""SIGKILL of a rank to the first new step, by phase: `torchrun --max-restarts` beside `lastwords run`."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests.bench import report

SCRIPT = pathlib.Path(__file__).with_name("restart_script.py")
PHASES = ("began", "imported", "group", "model", "restored", "first new step")
RUN_SECONDS = 30
"""Faults strike jobs that have been running for a while: whatever a launcher prepares for them is prepared by then."""


def events(folder: pathlib.Path) -> list[dict[str, object]]:
    """All events of all ranks, in order of time."""
    rows = []
    for path in folder.glob("events-*.jsonl"):
        rows += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(rows, key=lambda row: float(row["time"]))


def command(mode: str, folder: pathlib.Path, state_mb: float, steps: int) -> list[str]:
    """The command line of one run with 2 x 2 ranks."""
    script = [str(SCRIPT), f"--mode={mode}", f"--state-mb={state_mb}", f"--steps={steps}", f"--folder={folder}"]
    if mode == "torch":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=3",
                "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *script]  # fmt: skip
    run = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--workers=2", "--procs=2"]
    return [*run, f"--dir={folder / 'job'}", "--save-every=10steps", "--", sys.executable, *script]


def measure(mode: str, state_mb: float, steps: int = 100_000, deadline_seconds: float = 240) -> dict[str, float]:
    """
    Kill rank 1 half a minute after its first step.

    Returns seconds from the kill to each phase of the slowest rank, and the steps lost.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-"))
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command(mode, folder, state_mb, steps),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return _kill_and_wait(process, folder, deadline_seconds)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _kill_and_wait(process: subprocess.Popen[bytes], folder: pathlib.Path, deadline_seconds: float) -> dict[str, float]:
    deadline = time.time() + deadline_seconds
    killed_at, victim = 0.0, 0
    while time.time() < deadline:
        if process.poll() is not None and not killed_at:
            break
        rows = events(folder)
        steps = [row for row in rows if row["event"] == "step"]
        if not killed_at:
            made = [row for row in steps if row["rank"] == 1]
            # in the middle between two of the saves, which are ten steps apart
            if made and float(made[0]["time"]) + RUN_SECONDS < time.time() and int(made[-1]["step"]) % 10 == 5:  # type: ignore[arg-type,call-overload]
                victim, killed_at = int(made[-1]["pid"]), time.time()  # type: ignore[call-overload]
                os.kill(victim, signal.SIGKILL)
        else:
            result = _phases(rows, killed_at)
            if result:
                return result
        time.sleep(0.02)
    raise RuntimeError(f"no new step within {deadline_seconds} s:\n{(folder / 'output').read_text()[-3000:]}")


def _phases(rows: list[dict[str, object]], killed_at: float) -> dict[str, float]:
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


def main(quick: bool = False) -> None:
    """All rows of this topic."""
    rows: list[report.Row] = []
    for state_mb in [50] if quick else [50, 1000]:
        repeats = 1 if quick or state_mb > 500 else 3
        ours = [measure("lastwords", state_mb) for _ in range(repeats)]
        torch = [measure("torch", state_mb) for _ in range(repeats)]
        for phase in PHASES[:-1]:
            rows.append(
                report.information(
                    f"{state_mb} MB, kill to {phase}",
                    report.median([one[phase] for one in ours]),
                    "s",
                    "torchrun",
                    report.median([one[phase] for one in torch]),
                )
            )
        mine = report.median([one["first new step"] for one in ours])
        theirs = report.median([one["first new step"] for one in torch])
        rows.append(report.faster(f"{state_mb} MB, kill to first new step", mine, "s", "torchrun", theirs, 5))
        lost = max(one["steps lost"] for one in ours)
        lost_torch = max(one["steps lost"] for one in torch)
        rows.append(
            report.Row(
                name=f"{state_mb} MB, steps lost",
                value=lost,
                unit="",
                baseline="torchrun",
                baseline_value=lost_torch,
                goal="0",
                met=lost == 0,
            )
        )
    report.publish("restart", rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
