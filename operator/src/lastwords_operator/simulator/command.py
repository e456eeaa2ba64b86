"""`lastwords simulate`: what goodput to expect, and what another policy would cost."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import pathlib
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lastwords_operator.core import tuning
from lastwords_operator.simulator import compare, failures, plots, policies, presets
from lastwords_operator.simulator.compare import Line
from lastwords_operator.simulator.failures import Cluster, Failure, FailuresError
from lastwords_operator.simulator.world import Protection, World

EXAMPLES = """\
examples:
  lastwords simulate --preset llama3-405b
  lastwords simulate --nodes 256 --days 365 --stall 0.5 --durable 60 --layout 8x2
  lastwords simulate --nodes 1024 --trace outages.csv --stall 60 --durable 60 --no-last-words --json
"""
DEFAULT_POLICIES = ("ours", "plain loss", "Daly", "fixed 30 min", "fixed 1 h", compare.BEST, "clairvoyant")
_LAYOUTS = {"ddp": (1, 0), "hsdp": (0, 2), "fsdp": (0, 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    system = parser.add_argument_group("the cluster")
    system.add_argument(
        "--preset", choices=sorted(presets.PRESETS), help="begin with the numbers of a published system"
    )
    system.add_argument("--nodes", type=_count, metavar="N", help="nodes of the job (default 128)")
    system.add_argument("--spares", type=_whole, metavar="N", help="spare nodes (default: always one there)")
    system.add_argument("--days", type=_positive, default=365.0, metavar="D", help="length of the job (default 365)")
    system.add_argument("--rate", type=_positive, metavar="R", help="failures per 1000 node-days (default 4)")
    system.add_argument(
        "--failures",
        default="poisson",
        metavar="PROCESS",
        help="poisson, weibull:0.7, bursts:5, step:5, lemons:0.02:20",
    )
    system.add_argument("--trace", type=pathlib.Path, metavar="CSV", help="seconds,node,category,down_minutes instead")
    costs = parser.add_argument_group("the job")
    costs.add_argument("--step", type=_positive, default=1.0, metavar="S", help="seconds of a step (default 1)")
    costs.add_argument("--stall", type=_time, metavar="S", help="seconds that a save stops training (default 1)")
    costs.add_argument("--durable", type=_positive, metavar="S", help="seconds until it is in storage (default 60)")
    costs.add_argument(
        "--slowdown", type=_share, default=0.0, metavar="X", help="how much slower steps are until then (default 0)"
    )
    costs.add_argument(
        "--recovery", type=_time, default=100.0, metavar="S", help="from failure to first new step (default 100)"
    )
    costs.add_argument(
        "--layout", type=_layout, default="ddp", metavar="L", help="ddp, hsdp, fsdp, or PIECESxREPLICAS (default ddp)"
    )
    costs.add_argument("--no-last-words", action="store_true", help="checkpoints alone, no state in memory is used")
    out = parser.add_argument_group("the answer")
    out.add_argument(
        "--policies", type=_policies, default=DEFAULT_POLICIES, metavar="A,B", help="which (default: most)"
    )
    out.add_argument("--runs", type=_count, default=5, metavar="N", help="histories (default 5)")
    out.add_argument("--seed", type=int, default=1, help="the same seed gives the same answer (default 1)")
    out.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="write pictures into this folder (matplotlib)")
    form = out.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--csv", action="store_true", help="for spreadsheets")


def run(options: argparse.Namespace) -> int:
    """Simulate and print. `FailuresError` for what cannot be used."""
    world, histories = prepare(options)
    lines, first = compare.run(world, histories, options.policies)
    if options.json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
    elif options.csv:
        print(_csv(lines), end="")
    else:
        _print(world, lines, options)
    if options.plot:
        for path in plots.draw(options.plot, world, histories, (lines, first)):
            print(path, file=sys.stderr)
    return 0


def prepare(options: argparse.Namespace) -> tuple[World, list[list[Failure]]]:
    """The world and its histories."""
    preset = presets.PRESETS.get(options.preset or "")
    nodes = options.nodes or (preset.nodes if preset else 128)
    rate = options.rate or (preset.per_1000_node_days if preset else 4.0)
    stall = options.stall if options.stall is not None else (preset.stall_seconds if preset else 1.0)
    durable = max(stall, options.durable or (preset.durable_seconds if preset else 60.0))
    seconds = options.days * 86400
    if options.trace:
        histories = [failures.read_trace(options.trace, options.seed + n) for n in range(options.runs)]
        seconds = min(seconds, histories[0][-1].at) if histories[0] else seconds
        if not any(node < nodes for failure in histories[0] for node in failure.nodes):
            raise FailuresError(f"no incident of the trace strikes nodes 0 to {nodes - 1}; give --nodes")
    else:
        cluster = Cluster(nodes=nodes + (options.spares or 0), seconds=seconds, per_node_hour=rate / 24000)
        process = failures.parse(options.failures)
        histories = [failures.draw(process, cluster, options.seed + n) for n in range(options.runs)]
    pieces, replicas = options.layout if isinstance(options.layout, tuple) else _layout(options.layout)
    pieces, replicas = pieces or max(1, nodes // (replicas or nodes)), replicas or nodes
    world = World(
        nodes=nodes, seconds=seconds, spares=options.spares,
        measured=tuning.Measured(
            step_seconds=options.step, stall_seconds=stall, copy_seconds=stall, durable_seconds=durable,
            persist_slowdown=options.slowdown, recovery_seconds=options.recovery,
        ),
        recovery=(("recovery", options.recovery),),
        protection=Protection(
            last_words=not options.no_last_words, snapshots=not options.no_last_words, pieces=pieces, replicas=replicas
        ),
    )  # fmt: skip
    return world, histories


def _print(world: World, lines: Sequence[Line], options: argparse.Namespace) -> None:
    if options.preset:
        print(f"{options.preset}: {presets.PRESETS[options.preset].source}")
    kept = "no last words" if options.no_last_words else "with last words"
    print(
        f"{world.nodes} nodes for {tuning.duration(world.seconds)}, {lines[0].failures:.0f} failures, {kept}; "
        f"a save costs {tuning.duration(world.measured.snapshot_cost + world.measured.checkpoint_cost)}"
    )
    table = Table(box=box.SIMPLE, padding=(0, 0, 0, 1))
    waits = ["waits"] if world.spares is not None else []
    for heading in ("policy", "goodput", "±", "saves", "redone", "recovery", *waits, "interval", "changes"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for line in lines:
        shares = [line.goodput.mean, line.goodput.half_width, line.saving, line.redone, line.recovering]
        shares += [line.waiting] if waits else []
        table.add_row(
            line.policy, *(f"{share:.2%}" for share in shares),
            tuning.duration(line.interval_seconds), f"{line.changes:.0f}",
        )  # fmt: skip
    console = Console()
    Console(width=max(96, console.width)).print(table)


def _csv(lines: Sequence[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in dataclasses.fields(Line)]
    writer.writerow([*names[:2], "goodput_half_width", *names[2:]])
    for line in lines:
        rest = [getattr(line, name) for name in names[2:]]
        writer.writerow([line.policy, line.goodput.mean, line.goodput.half_width, *rest])
    return text.getvalue()


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    known = (*policies.NAMED, compare.BEST)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy; there are {', '.join(known)}")
    return names


def _layout(text: str) -> tuple[int, int]:
    """(pieces, replicas); 0 stands for as many as the nodes allow."""
    if text in _LAYOUTS:
        return _LAYOUTS[text]
    pieces, _, replicas = text.partition("x")
    if not (pieces.isdigit() and replicas.isdigit() and int(pieces) and int(replicas)):
        raise argparse.ArgumentTypeError(f"{text!r} is none of ddp, hsdp, fsdp, or PIECESxREPLICAS like 8x2")
    return int(pieces), int(replicas)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> float:
    value = _time(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def _share(text: str) -> float:
    value = _time(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value
