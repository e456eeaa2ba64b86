"""
`python tests/storm/run.py --kills 200`: random and aimed SIGKILLs, then the proof that nothing was lost.
With `--lose-workers` whole workers go too, with `--fsdp` the state is cut over all ranks.

The storm ends with Ctrl-C: all ranks stop after the same step, and the undisturbed run makes as many.
The proof: loss of every step and final bytes equal those of an undisturbed run; each
restored step is the one that the brute-force oracle names from the same inventory; no torn part or checkpoint was
accepted; no process, socket or memory folder is left.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.storm import driver, oracle  # noqa: E402  (the repository's root is only now on the path)

NEEDED = (
    "update",
    "snapshot_copy",
    "live_copy",
    "persist",
    "commit_gap",
    "restore",
    "gathering",
    "second kill during recovery",
)


def reference_run(folder: pathlib.Path, script: tuple[str, ...], world: int) -> None:
    """The undisturbed run: plain processes, no Lastwords."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(driver.REFERENCE), *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)


def losses(out: pathlib.Path, world: int) -> dict[tuple[int, int], str]:
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


def missing_windows(storm: driver.Storm, wanted: int) -> list[str]:
    """Windows that have too few kills so far."""
    counts = storm.counts()
    return [name for name in NEEDED if counts.get(name, 0) < wanted]


def rage(storm: driver.Storm, kills: int, per_window: int, deadline_seconds: float) -> None:
    """Kill until there are enough, of each kind too."""
    deadline = time.monotonic() + deadline_seconds
    storm.wait_for_first_snapshot()
    while time.monotonic() < deadline:
        storm.wait_for_progress()
        assert storm.process is not None
        if storm.process.poll() is not None:
            break
        needed = missing_windows(storm, per_window)
        if not needed and len(storm.kills) >= kills:
            break
        if needed and storm.random.random() < 0.8:
            window = storm.random.choice(needed)
            if window == "gathering":
                storm.kill_in_state("Gathering")
            elif window == "second kill during recovery":
                storm.kill_in_state(storm.random.choice(["LastWords", "Recovering", "Starting"]))
            else:
                storm.kill_in_window(window)
        else:
            storm.kill_anything()


def prove(storm: driver.Storm, script: tuple[str, ...], plain: pathlib.Path) -> None:
    """Everything that must hold at the end; AssertionError with what does not."""
    world = storm.settings.workers * storm.settings.procs
    out = storm.settings.folder / "storm.json"
    assert storm.process is not None
    storm.process.send_signal(signal.SIGINT)
    storm.process.wait(timeout=300)
    assert out.exists(), f"no planned end\n{(storm.settings.folder / 'output.log').read_text()[-6000:]}"
    steps = json.loads(out.read_text())["steps"]
    assert not storm.left_over(), f"left behind: {storm.left_over()}"
    left = [str(path) for path in storm.settings.memory.rglob("*")] if storm.settings.memory.exists() else []
    assert not left, f"memory left behind: {left[:5]}"
    oracle.check_journal(storm.settings.folder / "journal.jsonl")
    oracle.check_checkpoints(storm.job / "checkpoints")
    reseeded = [row for row in storm.status()["recoveries"] if row["exact"] is False]
    assert not reseeded, f"not bit-equal by its own word: {reseeded}"
    reference_run(storm.settings.folder, (*script, f"--steps={steps}"), world)
    mine, theirs = losses(out, world), losses(plain, world)
    missing = sorted(set(theirs) - set(mine))
    assert not missing, f"(rank, step) without a loss: {missing[:5]}"
    different = sorted(key for key in theirs if mine[key] != theirs[key])
    assert not different, f"losses differ first at (rank, step) {different[0]}, in {len(different)} places"
    assert json.loads(out.read_text()) == json.loads(plain.read_text()), "the final states differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-window", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=3700, help="of the model; 3700 is about 220 MB of state")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--deadline-seconds", type=float, default=7200)
    parser.add_argument("--fsdp", action="store_true", help="state cut over all ranks, with one replica of snapshots")
    parser.add_argument("--lose-workers", action="store_true", help="whole workers go too, their memory with them")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lw-storm-"))
    memory = pathlib.Path(tempfile.mkdtemp(prefix="lw-storm-", dir="/dev/shm"))
    print(f"folder {folder}, seed {arguments.seed}", flush=True)
    script = (f"--width={arguments.width}", f"--steps={arguments.steps}", "--schedule-steps=500")
    script += ("--shard",) if arguments.fsdp else ()
    script += (f"--out={folder / 'storm.json'}",)
    settings = driver.Settings(
        folder=folder,
        memory=memory,
        seed=arguments.seed,
        script=script,
        replicas=int(arguments.fsdp),
        lose_workers=arguments.lose_workers,
    )
    storm = driver.Storm(settings)
    storm.start()
    try:
        rage(storm, arguments.kills, arguments.per_window, arguments.deadline_seconds)
        plain = folder / "plain.json"
        prove(storm, (*script[:-1], f"--out={plain}"), plain)
        missing = missing_windows(storm, arguments.per_window)
        print(json.dumps(storm.counts(), indent=1))
        assert not missing, f"fewer than {arguments.per_window} kills in: {missing}"
        assert len(storm.kills) >= arguments.kills, f"only {len(storm.kills)} kills"
        print(f"{len(storm.kills)} kills, 0 lost steps that memory covered, bit-equal")
    finally:
        if storm.process is not None and storm.process.poll() is None:
            storm.process.terminate()
            storm.process.wait()
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
