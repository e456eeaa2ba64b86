"""The `lastwords` command."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from lastwords_operator import api, checkpoints
from lastwords_operator.local import asked, inject, run, status
from lastwords_operator.local.folder import FolderError
from lastwords_operator.simulator import command as simulate
from lastwords_operator.simulator.failures import FailuresError

USAGE = 2
"""Exit code for a command line or an input that cannot be used."""

_UNUSABLE = (
    api.JobFileError, asked.AskedError, inject.InjectError, FolderError, checkpoints.CheckpointsError, FailuresError,
)  # fmt: skip

_RUN_EXAMPLES = """\
examples:
  lastwords run --workers 2 --procs 2 -- python train.py --steps 1000
  lastwords run --save-every 30s --storage /data/checkpoints -- python train.py
  lastwords run -f job.yaml
  lastwords run --workers 2 --procs 2 --inject 'kill rank=1 at-step=30' -- python train.py

The same command again goes on where the job stopped, or shows it while it runs. Ctrl-C stops it after a step that all
ranks have saved; a second Ctrl-C ends it at once. The exit code is the job's: 0 complete, 130 stopped, else its error.
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="lastwords",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Keeps PyTorch training jobs running: a dead or hung rank costs seconds, and usually no step.",
        epilog="example:\n  lastwords run --workers 2 --procs 2 -- python train.py --steps 1000",
    )
    commands = top.add_subparsers(dest="call", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_status(commands)
    _add_checkpoints(commands)
    one = _add(
        commands, "simulate", "what goodput to expect, and what another save policy would cost", simulate.EXAMPLES
    )
    one.set_defaults(call=simulate.run)
    simulate.add_arguments(one)
    _add(commands, "version", "print the version", "lastwords version").set_defaults(call=_version)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. What cannot be used is one sentence on standard error."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(line)
    logging.basicConfig(level=os.environ.get("LASTWORDS_LOG_LEVEL", "ERROR").upper(), format="%(name)s: %(message)s")
    try:
        return int(options.call(options))
    except _UNUSABLE as error:
        print(f"lastwords: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, examples: str
) -> argparse.ArgumentParser:
    epilog = examples if "\n" in examples else f"example:\n  {examples}"
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _add(commands, "run", "run a job on this machine, and keep it running", _RUN_EXAMPLES)
    one.set_defaults(call=_run)
    one.add_argument("-f", "--file", type=pathlib.Path, metavar="JOB.YAML", help="a FaultTolerantJob")
    one.add_argument("--workers", type=_positive, metavar="N", help="workers (default 1)")
    one.add_argument("--procs", type=_positive, metavar="N", help="ranks per worker (default 1)")
    one.add_argument("--name", help="of the job (default: from the script's name)")
    one.add_argument("--dir", type=pathlib.Path, help="folder of the job (default .lastwords/NAME)")
    one.add_argument("--storage", metavar="PLACE", help="for checkpoints: folder or s3://… (default: in --dir)")
    one.add_argument("--memory-dir", type=pathlib.Path, metavar="DIR", help="tmpfs for snapshots (default /dev/shm)")
    one.add_argument("--save-every", type=_interval, metavar="30s|200steps", help="fixed interval (default: chosen)")
    one.add_argument(
        "--replicas", type=_count, metavar="N", help="other workers that keep each snapshot too (default 0)"
    )
    one.add_argument("--keep-every", type=_positive, metavar="STEPS", help="keep a checkpoint every so many for good")
    one.add_argument("--resume-from", metavar="PLACE", help="begin with a checkpoint of another job: STORAGE/NS/JOB")
    one.add_argument("--max-restarts", type=_count, metavar="N", help="restarts before the job fails (default 10)")
    one.add_argument(
        "--hang-seconds", type=_seconds, metavar="S", help="no step may take longer, unless it did before (default 30)"
    )
    one.add_argument(
        "--coordinator-lost-seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long workers go on without this command before they save and end (default 60)",
    )
    one.add_argument("--inject", action="append", default=[], metavar="FAULT", help="see the examples")
    one.add_argument("--plain", action="store_true", help="lines instead of the live view")
    one.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what each rank runs")


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _add(commands, "status", "show a job of this machine", "lastwords status .lastwords/train --json")
    one.set_defaults(call=_status)
    one.add_argument("dir", nargs="?", type=pathlib.Path, help="its folder (default: the only one in .lastwords)")
    one.add_argument("--json", action="store_true", help="for programs")


def _add_checkpoints(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _add(
        commands,
        "checkpoints",
        "look at the checkpoints in a storage",
        "lastwords checkpoints verify s3://bucket/prefix",
    )
    actions = one.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, call in (
        ("list", "one line for each committed checkpoint", checkpoints.list_command),
        ("verify", "read every byte and compare it with its checksum", checkpoints.verify_command),
        ("show", "what is in a checkpoint", checkpoints.show_command),
    ):
        action = _add(actions, name, text, f"lastwords checkpoints {name} .lastwords/train/checkpoints")
        action.add_argument("place", help="storage (a folder or s3://bucket/prefix), or one checkpoint in it")
        action.set_defaults(call=functools.partial(_on_place, call))
    text = "write a checkpoint as files that other programs read"
    action = _add(
        actions, "export", text, "lastwords checkpoints export s3://bucket/prefix --to exported --format torch"
    )
    action.add_argument("place", help="storage (a folder or s3://bucket/prefix), or one checkpoint in it")
    action.add_argument("--to", type=pathlib.Path, required=True, metavar="DIR", help="a new folder")
    action.add_argument("--format", choices=["torch", "dcp", "safetensors"], default="torch", help="default: torch")
    action.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    return checkpoints.export_command(options.place, options.to, options.format)


def _on_place(call: Callable[[str], int], options: argparse.Namespace) -> int:
    place: str = options.place
    return call(place)


def _run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    flags = asked.Flags(
        argv=argv,
        file=options.file,
        name=options.name,
        workers=options.workers,
        procs=options.procs,
        storage=options.storage,
        directory=options.dir,
        save_every=options.save_every,
        replicas=options.replicas,
        keep_every=options.keep_every,
        resume_from=options.resume_from,
        max_restarts=options.max_restarts,
        hang_seconds=options.hang_seconds,
    )
    wanted = asked.ask(flags)
    return run.run(
        wanted,
        memory=options.memory_dir,
        faults=[inject.parse(text, wanted.spec.workers, wanted.spec.processes_per_worker) for text in options.inject],
        coordinator_lost_seconds=options.coordinator_lost_seconds,
        plain=options.plain,
    )


def _status(options: argparse.Namespace) -> int:
    return status.show(options.dir, as_json=options.json)


def _version(options: argparse.Namespace) -> int:
    print(f"lastwords {importlib.metadata.version('lastwords-operator')}")
    return 0


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _interval(text: str) -> dict[str, float]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|steps?)", text)
    if found is None or float(found[1]) <= 0 or (found[2] != "s" and "." in found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither seconds like 30s nor steps like 200steps")
    return {"seconds": float(found[1])} if found[2] == "s" else {"steps": int(found[1])}


if __name__ == "__main__":
    sys.exit(main())
