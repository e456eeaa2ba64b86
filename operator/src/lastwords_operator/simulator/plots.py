"""
Pictures of a comparison: where the time goes, goodput against the interval, the interval over time. Needs matplotlib.
"""

from __future__ import annotations

import importlib
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from lastwords_operator.simulator import policies
from lastwords_operator.simulator.compare import Line
from lastwords_operator.simulator.failures import Failure, FailuresError
from lastwords_operator.simulator.world import Outcome, World, simulate

_SHORTEST_SECONDS = 30.0
_POINTS = 22


def draw(
    folder: pathlib.Path,
    world: World,
    histories: Sequence[Sequence[Failure]],
    result: tuple[list[Line], dict[str, Outcome]],
) -> list[pathlib.Path]:
    """
    Write three PNG files; their paths. `FailuresError` where matplotlib is missing or the folder cannot be written.
    """
    lines, first = result
    pyplot = _pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _waste(pyplot, folder / "waste.png", lines),
            _goodput(pyplot, folder / "goodput.png", world, histories, lines),
            _interval(pyplot, folder / "interval.png", first),
        ]
    except OSError as error:
        raise FailuresError(f"the pictures cannot be written to {folder}: {error}") from None


def _waste(pyplot: Any, path: pathlib.Path, lines: Sequence[Line]) -> pathlib.Path:
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.5 * len(lines)))
    left = [0.0 for _ in lines]
    for name in ("saving", "redone", "recovering", "waiting"):
        widths = [100 * float(getattr(line, name)) for line in lines]
        axes.barh([line.policy for line in lines], widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("lost time, %")
    axes.legend()
    return _written(pyplot, figure, path)


def _goodput(
    pyplot: Any, path: pathlib.Path, world: World, histories: Sequence[Sequence[Failure]], lines: Sequence[Line]
) -> pathlib.Path:
    intervals = [_SHORTEST_SECONDS * 2 ** (n / 2) for n in range(_POINTS)]
    means = [
        100 * statistics.fmean(simulate(world, history, policies.Fixed(interval)).goodput for history in histories)
        for interval in intervals
    ]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.semilogx(intervals, means, color="black", label="constant interval")
    for n, line in enumerate(lines):
        axes.axhline(100 * line.goodput.mean, color=f"C{n}", linestyle="--", label=line.policy)
    axes.set_xlabel("work between two checkpoints, s")
    axes.set_ylabel("goodput, %")
    axes.legend()
    return _written(pyplot, figure, path)


def _interval(pyplot: Any, path: pathlib.Path, first: dict[str, Outcome]) -> pathlib.Path:
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, outcome in first.items():
        if name != "clairvoyant":
            times, intervals = zip(*outcome.changes, (outcome.seconds, outcome.changes[-1][1]), strict=True)
            axes.step([at / 86400 for at in times], intervals, where="post", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("days")
    axes.set_ylabel("work between two checkpoints, s")
    axes.legend()
    return _written(pyplot, figure, path)


def _written(pyplot: Any, figure: Any, path: pathlib.Path) -> pathlib.Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise FailuresError("pictures need matplotlib: pip install 'lastwords-operator[demo]'") from None
