"""Stall per save and the cost of a whole step cycle, beside torch.save, dcp.save and warm dcp.async_save."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from tests.bench import report

SCRIPT = pathlib.Path(__file__).with_name("save_script.py")
MODES = ("none", "torch.save", "dcp.save", "dcp.async_save", "lastwords")
SAVE_EVERY = 4


def run(mode: str, state_mb: float, ranks: int, steps: int, batch: int) -> dict[str, Any]:
    """One run of the script; its result file."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-"))
    script = [str(SCRIPT), f"--mode={mode}", f"--state-mb={state_mb}", f"--steps={steps}"]
    script += [f"--save-every={SAVE_EVERY}", f"--batch={batch}", f"--folder={folder}"]
    if mode == "lastwords":
        command = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--workers=1"]
        command += [f"--procs={ranks}", f"--save-every={SAVE_EVERY}steps", f"--dir={folder / 'job'}", "--"]
        command += [sys.executable, *script]
    elif ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *script]
    else:
        command = [sys.executable, *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{mode}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((folder / f"result-{mode}.json").read_text())
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stall_seconds(result: dict[str, Any]) -> float:
    """Median stall of the saves after the first (warm)."""
    return report.median([row["stall_seconds"] for row in result["rows"] if row["saves"]][1:])


def cycle_seconds(result: dict[str, Any]) -> float:
    """Mean seconds of a step over whole save cycles, the first cycle left out."""
    rows = result["rows"][SAVE_EVERY:]
    return sum(row["seconds"] for row in rows) / len(rows)


def main(quick: bool = False) -> None:
    """All rows of this topic."""
    rows: list[report.Row] = []
    cases = [(50, 1, "an idle core"), (50, 2, "a full machine")]
    if not quick:
        cases += [(1000, 1, "an idle core"), (1000, 2, "a full machine")]
    for state_mb, ranks, machine in cases:
        batch = 256 if state_mb < 500 else 48
        steps = 24 if state_mb < 500 else 16
        results = {mode: run(mode, state_mb, ranks, steps, batch) for mode in MODES}
        where = f"{state_mb} MB, {ranks} rank{'s' if ranks > 1 else ''}, {machine}"
        ours = stall_seconds(results["lastwords"])
        for mode in MODES[1:-1]:
            theirs = stall_seconds(results[mode])
            if mode == "dcp.async_save" and ranks == 1:
                rows.append(report.at_most(f"stall per save, {where}", ours, "s", mode, theirs, 0.01))
            else:
                rows.append(report.information(f"stall per save, {where}", ours, "s", mode, theirs))
        for mode in MODES[1:]:
            rows.append(
                report.information(
                    f"step with saves every {SAVE_EVERY} by {mode}, {where}",
                    cycle_seconds(results[mode]),
                    "s",
                    "no saves",
                    cycle_seconds(results["none"]),
                )
            )
    report.publish("save", rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
