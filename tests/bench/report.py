"""Rows of a benchmark: what was measured, beside a named baseline of the same run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """
    One figure. `ratio` is value / baseline_value, or its inverse where `goal` says "at least"; `goal` is the
    limit for the ratio in words, `met` whether it holds (None: no goal, the row is information).
    """

    name: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


def at_most(name: str, value: float, unit: str, baseline: str, baseline_value: float, limit: float) -> Row:
    """A row whose value may be at most `limit` times the baseline."""
    ratio = value / baseline_value
    return Row(
        name=name,
        value=value,
        unit=unit,
        baseline=baseline,
        baseline_value=baseline_value,
        ratio=ratio,
        goal=f"ratio <= {limit:g}",
        met=ratio <= limit,
    )


def faster(name: str, value: float, unit: str, baseline: str, baseline_value: float, limit: float) -> Row:
    """A row of a duration: the baseline must take at least `limit` times as long."""
    ratio = baseline_value / value
    return Row(
        name=name,
        value=value,
        unit=unit,
        baseline=baseline,
        baseline_value=baseline_value,
        ratio=ratio,
        goal=f"baseline / value >= {limit:g}",
        met=ratio >= limit,
    )


def information(name: str, value: float, unit: str, baseline: str = "", baseline_value: float | None = None) -> Row:
    """A row without a goal."""
    ratio = value / baseline_value if baseline_value else None
    return Row(name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio)


def median(values: Sequence[float]) -> float:
    """Median; the machine is shared, so single values mean little."""
    return statistics.median(values)


def publish(topic: str, rows: Sequence[Row]) -> None:
    """Write build/bench/<topic>.json and print the table."""
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{topic}.json"
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    print(f"\n{topic}")
    for row in rows:
        against = f"{row.baseline}: {row.baseline_value:.4g} {row.unit}" if row.baseline_value is not None else ""
        ratio = f"ratio {row.ratio:.3g}" if row.ratio is not None else ""
        verdict = {True: "met", False: "NOT MET", None: ""}[row.met]
        print(f"  {row.name:<58} {row.value:>10.4g} {row.unit:<3} {against:<42} {ratio:<14} {row.goal:<22} {verdict}")
