"""
The demo: train a small GPT while a rank is killed, a worker is lost and a rank is stopped; prove that nothing was lost.

    python examples/demo/demo.py            what `make demo` runs
    python examples/demo/demo.py --fsdp     with weights and optimizer state cut over all ranks (FSDP2)

1. trains examples/chargpt/train.py with 2 workers x 2 ranks under `lastwords run`: a rank is killed, later a whole
   worker is lost with its memory, and at last a rank hangs;
2. trains the same again, undisturbed and without Lastwords, by `torchrun`;
3. compares, step by step and bit by bit, and draws loss and events over time.

Exit status 0 means that the proof held.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import rich.console
import rich.table

from lastwords.protocol.manifest import decode_manifest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "chargpt" / "train.py"
WORKERS, PROCS = 2, 2

console = rich.console.Console()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What a run left: loss by (rank, step) as hexadecimal text, when each step was logged, hash of the weights."""

    losses: dict[tuple[int, int], str]
    repeated: int
    """Steps that were done again after a restart, and gave the same loss."""
    sha256: str
    seconds: float


class ProofError(Exception):
    """The two runs differ; the text says where."""


def environment() -> dict[str, str]:
    """One thread per rank, and no warning about DDP's unused parameters from each of them."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def script(steps: int, out: pathlib.Path, fsdp: bool) -> list[str]:
    """Command line of the training script."""
    return [str(SCRIPT), f"--steps={steps}", f"--out={out}", *(["--shard"] if fsdp else [])]


def run_protected(folder: pathlib.Path, training: list[str], injections: list[str], plain: bool) -> float:
    """The run that is disturbed; returns its seconds."""
    command = [sys.executable, "-m", "lastwords_operator.cli", "run", f"--workers={WORKERS}", f"--procs={PROCS}"]
    command += ["--name=demo", f"--dir={folder / 'job'}", "--save-every=20steps"]
    # With sharded weights only a replica has what a lost worker's ranks held alone.
    command += ["--replicas=1"] if "--shard" in training else []
    command += ["--plain"] if plain else []
    for injection in injections:
        command += ["--inject", injection]
    began = time.monotonic()
    done = subprocess.run([*command, "--", sys.executable, *training], env=environment(), check=False)
    if done.returncode:
        raise ProofError(f"the disturbed run ended with exit code {done.returncode}; see {folder / 'job' / 'logs'}")
    return time.monotonic() - began


def run_undisturbed(folder: pathlib.Path, training: list[str]) -> float:
    """The same training, by plain torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS * PROCS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *training]
    log = folder / "undisturbed.log"
    began = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(command, env=environment(), stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise ProofError(f"the undisturbed run ended with exit code {done.returncode}; see {log}")
    return time.monotonic() - began


def read_training(out: pathlib.Path, seconds: float) -> Training:
    """What the script wrote. ProofError when a step that was done twice had two losses."""
    losses: dict[tuple[int, int], str] = {}
    repeated = 0
    for rank in range(WORKERS * PROCS):
        for line in out.with_name(f"{out.name}.rank{rank}.jsonl").read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote this line; the step is done again
            key = (rank, int(row["step"]))
            if key in losses:
                repeated += 1
                if losses[key] != row["loss"]:
                    raise ProofError(f"rank {rank} did step {key[1]} twice, with different losses")
            losses[key] = row["loss"]
    return Training(losses=losses, repeated=repeated, sha256=json.loads(out.read_text())["sha256"], seconds=seconds)


def saved_sha256(folder: pathlib.Path) -> str:
    """Hash of the weights in the final checkpoint, made as the script makes it of its live model."""
    newest = max((folder / "job" / "checkpoints").glob("*/*/step-*/manifest.json"))
    manifest = decode_manifest(newest.read_bytes())
    found: dict[str, list[tuple[tuple[int, ...], bytes]]] = {}
    for part in manifest.parts:
        data = (newest.parent / part.data.name).read_bytes() if part.data else b""
        for stored in part.chunks:
            chunk = manifest.plan.chunks[stored.chunk_id]
            found.setdefault(chunk.name, []).append((chunk.offsets, data[stored.begin : stored.end]))
    weights = hashlib.sha256()
    for name, chunks in sorted(found.items()):
        if name.startswith("model."):  # cut along the first dimension only, so the pieces follow each other
            weights.update(name.removeprefix("model.").encode() + b"".join(data for _, data in sorted(chunks)))
    return weights.hexdigest()


def compare(disturbed: Training, undisturbed: Training, steps: int) -> None:
    """ProofError at the first difference."""
    expected = {(rank, step) for rank in range(WORKERS * PROCS) for step in range(steps)}
    for name, training in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        if set(training.losses) != expected:
            missing = sorted(expected - set(training.losses))[:5]
            raise ProofError(f"the {name} run has no loss for (rank, step) {missing}")
    for rank, step in sorted(expected, key=lambda key: (key[1], key[0])):
        mine, theirs = disturbed.losses[rank, step], undisturbed.losses[rank, step]
        if mine != theirs:
            raise ProofError(f"rank {rank}, step {step}: loss {mine} in the disturbed run, {theirs} in the other")
    if disturbed.sha256 != undisturbed.sha256:
        raise ProofError(f"the final weights differ: {disturbed.sha256} and {undisturbed.sha256}")


def read_recoveries(folder: pathlib.Path) -> list[dict[str, Any]]:
    """`status.recoveries` of the finished job."""
    status = json.loads((folder / "job" / "status.json").read_text())["status"]
    return list(status["recoveries"])


def read_events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """events.jsonl of the job."""
    return [json.loads(line) for line in (folder / "job" / "events.jsonl").read_text().splitlines()]


def span(later: float | None, earlier: float | None) -> str:
    """Milliseconds between two times, for the table."""
    return "" if later is None or earlier is None else f"{(later - earlier) * 1000:.0f} ms"


def summary(recoveries: list[dict[str, Any]], faults: list[float]) -> rich.table.Table:
    """One row for each fault; `faults` are the times at which the signals were sent."""
    table = rich.table.Table(title="What happened", title_justify="left")
    for column in ("fault", "noticed after", "kept", "stopped", "restarted", "first new step", "steps lost"):
        table.add_column(column)
    for row, began in zip(recoveries, faults, strict=False):
        table.add_row(
            row["kind"] + ("" if row["rank"] is None else f", rank {row['rank']}"),
            span(row["detected_at"], began),
            f"step {row['step']} from {row['source']}, +{span(row['kept_at'], row['detected_at'])}",
            f"+{span(row['stopped_at'], row['kept_at'])}",
            f"+{span(row['restored_at'], row['stopped_at'])}",
            f"{span(row['first_step_at'], began)} after the fault",
            str(row["steps_lost"]),
        )
    return table


def draw(folder: pathlib.Path, disturbed: Training, undisturbed: Training, picture: pathlib.Path) -> None:
    """Loss of both runs by step, and the events of the disturbed one over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = sorted({step for _, step in disturbed.losses})
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 7), height_ratios=[3, 2], layout="constrained")
    above.plot(steps, [float.fromhex(undisturbed.losses[0, step]) for step in steps], linewidth=4, alpha=0.35)
    above.plot(steps, [float.fromhex(disturbed.losses[0, step]) for step in steps], linewidth=1)
    above.legend(["undisturbed, plain torchrun", "one rank killed, one rank stopped, under Lastwords"])
    above.set(xlabel="step", ylabel="loss of rank 0", title="Two runs, the same losses to the last bit")
    for row in read_recoveries(folder):
        above.axvline(row["step"], color="tab:red", linestyle=":", linewidth=1)
    events = read_events(folder)
    first = events[0]["at"]
    for number, event in enumerate(events):
        color = "tab:red" if event.get("warning") else "tab:blue"
        height = 1 + number % 6
        below.vlines(event["at"] - first, 0, height, color=color, linewidth=0.8)
        below.text(event["at"] - first, height, f" {event['reason']}", fontsize=7, color=color)
    below.set(xlabel="seconds", yticks=[], title="Events of the disturbed run", ylim=(0, 7.5))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> int:
    """Run it; 0 = the proof held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "demo")
    parser.add_argument("--fsdp", action="store_true", help="cut the model over all ranks")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    arguments = parser.parse_args()
    folder: pathlib.Path = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kill_at, lose_at, stop_at = (arguments.steps * percent // 100 for percent in (30, 55, 80))
    injections = [
        f"kill rank=1 at-step={kill_at}",
        f"lose worker=1 at-step={lose_at}",
        f"stop rank=2 at-step={stop_at}",
    ]
    console.rule("1. a disturbed run under Lastwords")
    console.print(
        f"rank 1 will be killed at step {kill_at}, worker 1 lost with its memory at step {lose_at}, rank 2 stopped at "
        f"step {stop_at}"
    )
    try:
        training = script(arguments.steps, folder / "disturbed.json", arguments.fsdp)
        seconds = run_protected(folder, training, injections, arguments.plain)
        disturbed = read_training(folder / "disturbed.json", seconds)
        console.rule("2. the same training, undisturbed, by plain torchrun")
        training = script(arguments.steps, folder / "undisturbed.json", arguments.fsdp)
        undisturbed = read_training(folder / "undisturbed.json", run_undisturbed(folder, training))
        console.print(f"{arguments.steps} steps in {undisturbed.seconds:.0f} s")
        console.rule("3. the proof")
        recoveries = read_recoveries(folder)
        faults = [event["at"] for event in read_events(folder) if event["reason"] == "Injected"]
        console.print(summary(recoveries, faults))
        if len(recoveries) != len(injections):
            raise ProofError(f"{len(injections)} faults were made, but {len(recoveries)} restarts happened")
        compare(disturbed, undisturbed, arguments.steps)
        if saved_sha256(folder) != undisturbed.sha256:
            raise ProofError("the final checkpoint of the disturbed run holds other weights than the undisturbed run")
    except ProofError as error:
        console.print(f"[bold red]The proof failed:[/] {error}")
        return 1
    picture = folder / "demo.png"
    draw(folder, disturbed, undisturbed, picture)
    again = f"{disturbed.repeated} of them were computed twice, with the same result. " if disturbed.repeated else ""
    console.print(
        f"[bold green]The proof held.[/] {len(disturbed.losses)} losses of {WORKERS * PROCS} ranks are equal to the "
        f"last bit, and so are the final weights and those in the last checkpoint (sha256 {disturbed.sha256[:16]}…).\n"
        f"{again}Picture: {os.path.relpath(picture)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
