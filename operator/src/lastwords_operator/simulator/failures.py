"""
When what fails: random processes and lists of real incidents. All processes keep the mean rate they are given, so
that they can be compared; all draw from one seeded source, so that a seed gives one history.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import random
from collections.abc import Callable, Iterator

SOFT_CATEGORIES = ("software", "human")
"""Categories of trace files in which the node itself lives on."""
BURST_SECONDS = 600.0
_DOWN_SPREAD = 1.0
"""Of the logarithm of repair times, which are lognormal (Schroeder and Gibson, DSN 2006)."""


class FailuresError(ValueError):
    """A process or a trace that cannot be used; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Nodes that fail at one moment. `luck`, uniform in [0, 1), decides what is left to chance."""

    at: float
    nodes: tuple[int, ...]
    hard: bool
    """The nodes are gone with their memory; else only processes died."""
    down_seconds: float
    luck: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What fails: `nodes` machines, spare ones included, watched for `seconds`."""

    nodes: int
    seconds: float
    per_node_hour: float
    hard_share: float = 0.8
    down_mean_seconds: float = 4 * 3600.0

    @property
    def per_second(self) -> float:
        """Failures per second of all nodes together."""
        return self.nodes * self.per_node_hour / 3600


Times = Callable[[Cluster, random.Random], Iterator[tuple[float, int]]]
"""Yields (seconds, node) in the order of time, for ever or until the end."""


def draw(times: Times, cluster: Cluster, seed: int) -> list[Failure]:
    """One history of a cluster."""
    rng = random.Random(f"failures {seed}")
    found = []
    location = math.log(cluster.down_mean_seconds) - _DOWN_SPREAD**2 / 2 if cluster.down_mean_seconds > 0 else -math.inf
    for at, node in times(cluster, rng):
        if at >= cluster.seconds:
            break
        down = math.exp(rng.gauss(location, _DOWN_SPREAD)) if location > -math.inf else 0.0
        hard = rng.random() < cluster.hard_share
        found.append(Failure(at=at, nodes=(node,), hard=hard, down_seconds=down, luck=rng.random()))
    return found


def poisson(cluster: Cluster, rng: random.Random) -> Iterator[tuple[float, int]]:
    """Independent failures at a constant rate."""
    at = 0.0
    while cluster.per_second > 0:
        at += rng.expovariate(cluster.per_second)
        yield at, rng.randrange(cluster.nodes)


def weibull(shape: float) -> Times:
    """Times between failures of the cluster are Weibull; a shape below 1 brings failures in heaps, with a long tail."""

    def times(cluster: Cluster, rng: random.Random) -> Iterator[tuple[float, int]]:
        at = 0.0
        while cluster.per_second > 0:
            at += rng.weibullvariate(1 / cluster.per_second / math.gamma(1 + 1 / shape), shape)
            yield at, rng.randrange(cluster.nodes)

    return times


def bursts(size: int, share: float = 0.1) -> Times:
    """A `share` of failures takes `size` nodes, one after the other within ten minutes."""

    def times(cluster: Cluster, rng: random.Random) -> Iterator[tuple[float, int]]:
        first_per_second = cluster.per_second / (1 + share * (size - 1))
        at, waiting = 0.0, list[tuple[float, int]]()
        while first_per_second > 0:
            at += rng.expovariate(first_per_second)
            waiting.append((at, rng.randrange(cluster.nodes)))
            if rng.random() < share:
                waiting += [(at + rng.uniform(0, BURST_SECONDS), rng.randrange(cluster.nodes)) for _ in range(size - 1)]
            waiting.sort()
            while waiting and waiting[0][0] <= at:
                yield waiting.pop(0)

    return times


def step_change(factor: float) -> Times:
    """Half-way the rate becomes `factor` times what it was."""

    def times(cluster: Cluster, rng: random.Random) -> Iterator[tuple[float, int]]:
        before = 2 * cluster.per_second / (1 + factor)
        middle = cluster.seconds / 2
        at = 0.0
        while before > 0:
            # A unit of a Poisson process of rate 1, stretched by the rate in force.
            unit = rng.expovariate(1)
            if at < middle and at + unit / before > middle:
                at, unit = middle, unit - (middle - at) * before
            at += unit / (before if at < middle else before * factor)
            yield at, rng.randrange(cluster.nodes)

    return times


def lemons(share: float, factor: float) -> Times:
    """A `share` of the nodes fails `factor` times as often as the others."""

    def times(cluster: Cluster, rng: random.Random) -> Iterator[tuple[float, int]]:
        sick = max(1, round(share * cluster.nodes))
        weight = sick * factor
        sickness = weight / (weight + cluster.nodes - sick)
        at = 0.0
        while cluster.per_second > 0:
            at += rng.expovariate(cluster.per_second)
            ill = rng.random() < sickness or sick == cluster.nodes
            yield at, rng.randrange(sick) if ill else rng.randrange(sick, cluster.nodes)

    return times


def parse(text: str) -> Times:
    """A process from its name: poisson, weibull:SHAPE, bursts:SIZE, step:FACTOR, lemons:SHARE:FACTOR."""
    name, *numbers = text.split(":")
    known: dict[str, tuple[int, Callable[..., Times]]] = {
        "poisson": (0, lambda: poisson),
        "weibull": (1, weibull),
        "bursts": (1, lambda size: bursts(int(size))),
        "step": (1, step_change),
        "lemons": (2, lemons),
    }
    try:
        count, make = known[name]
        values = [float(number) for number in numbers]
    except (KeyError, ValueError):
        count, make, values = -1, weibull, []
    if len(values) != count or not all(0 < value < math.inf for value in values):
        raise FailuresError(
            f"{text!r} is no failure process; there are poisson, weibull:SHAPE, bursts:SIZE, step:FACTOR and "
            "lemons:SHARE:FACTOR, with numbers above 0, for example weibull:0.7"
        )
    if name == "lemons" and values[0] > 1:
        raise FailuresError(f"{text!r}: the share of lemon nodes is at most 1")
    return make(*values)


def read_trace(path: pathlib.Path, seed: int = 0) -> list[Failure]:
    """
    Incidents of a file with the columns seconds, node, category, down_minutes (comments after #). Nodes that fail in
    the same second are one failure. `FailuresError` names the line that cannot be read.
    """
    rng = random.Random(f"trace {seed}")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FailuresError(f"the trace {path} cannot be read: {error}") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not rows or rows[0][1].replace(" ", "") != "seconds,node,category,down_minutes":
        raise FailuresError(f"the trace {path} must begin with the line seconds,node,category,down_minutes")
    found: list[Failure] = []
    for number, line in rows[1:]:
        try:
            at, node, category, down = next(csv.reader([line]))
            one = Failure(
                at=float(at), nodes=(int(node),), hard=category not in SOFT_CATEGORIES,
                down_seconds=float(down) * 60, luck=rng.random(),
            )  # fmt: skip
            if not (0 <= one.at < math.inf and 0 <= one.down_seconds < math.inf):
                raise ValueError
        except ValueError:
            raise FailuresError(
                f"line {number} of the trace {path} is not seconds,node,category,down_minutes"
            ) from None
        if found and one.at < found[-1].at:
            raise FailuresError(f"line {number} of the trace {path} is earlier than the one before it")
        if found and one.at == found[-1].at:
            last = found.pop()
            one = dataclasses.replace(
                last, nodes=(*last.nodes, *one.nodes), hard=last.hard or one.hard,
                down_seconds=max(last.down_seconds, one.down_seconds),
            )  # fmt: skip
        found.append(one)
    return found
