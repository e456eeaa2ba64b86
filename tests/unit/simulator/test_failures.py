"""
Failure processes keep their mean rate and have the shape they are named for; traces are read and refused in words.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics

import pytest

from lastwords_operator.simulator import failures
from lastwords_operator.simulator.failures import Cluster, Failure, FailuresError

DAY = 86400.0
CLUSTER = Cluster(nodes=256, seconds=2000 * DAY, per_node_hour=4 / 24000)
TRACES = pathlib.Path(__file__).resolve().parents[2] / "data" / "traces"


def drawn(text: str, seed: int = 1) -> list[Failure]:
    return failures.draw(failures.parse(text), CLUSTER, seed)


def gaps(found: list[Failure]) -> list[float]:
    return [b.at - a.at for a, b in itertools.pairwise(found)]


@pytest.mark.parametrize("text", ["poisson", "weibull:0.7", "bursts:5", "step:5", "lemons:0.02:20"])
def test_all_processes_keep_the_mean_rate(text: str) -> None:
    """2048 failures are expected; in order, of real nodes, four fifths of them hard."""
    found = drawn(text)
    assert len(found) == pytest.approx(2048, rel=0.1)
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert {node for one in found for node in one.nodes} <= set(range(256))
    assert statistics.fmean(one.hard for one in found) == pytest.approx(0.8, abs=0.05)
    assert statistics.fmean(one.down_seconds for one in found) == pytest.approx(4 * 3600, rel=0.2)


def test_shapes() -> None:
    def variation(text: str) -> float:
        found = gaps(drawn(text))
        return statistics.stdev(found) / statistics.fmean(found)

    assert variation("poisson") == pytest.approx(1, abs=0.08)
    assert variation("weibull:0.7") == pytest.approx(1.46, abs=0.15)
    assert variation("bursts:5") > 1.15
    half = CLUSTER.seconds / 2
    before = sum(one.at < half for one in drawn("step:5"))
    assert (2048 - before) / before == pytest.approx(5, rel=0.25)
    sick = sum(one.nodes[0] < 5 for one in drawn("lemons:0.02:20"))
    assert sick / 2048 == pytest.approx(100 / 351, rel=0.2)


def test_the_same_seed_gives_the_same_history() -> None:
    assert drawn("weibull:0.7", 3) == drawn("weibull:0.7", 3)
    assert drawn("weibull:0.7", 3) != drawn("weibull:0.7", 4)


@pytest.mark.parametrize(
    "text", ["", "gauss", "weibull", "weibull:0", "weibull:x", "step:5:6", "lemons:2:5", "step:inf"]
)
def test_what_is_no_process_is_refused_in_words(text: str) -> None:
    with pytest.raises(FailuresError, match=r"no failure process; there are poisson|at most 1"):
        failures.parse(text)


def test_a_cluster_that_never_fails() -> None:
    never = Cluster(nodes=8, seconds=DAY, per_node_hour=0.0)
    for text in ("poisson", "weibull:0.7", "bursts:5", "step:5", "lemons:0.02:20"):
        assert failures.draw(failures.parse(text), never, 1) == []


@pytest.mark.parametrize(("name", "count"), [("lanl-8", 400), ("lanl-18", 3500), ("lanl-20", 2200)])
def test_real_traces_are_read(name: str, count: int) -> None:
    found = failures.read_trace(TRACES / f"{name}.csv")
    assert len(found) > count
    assert gaps(found) and min(gaps(found)) > 0
    assert {one.hard for one in found} == {True, False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the line"),
        ("time,node\n1,2\n", "must begin with the line"),
        ("seconds,node,category,down_minutes\n1,2,hardware\n", "line 2 of the trace"),
        ("# note\nseconds,node,category,down_minutes\n1,2,hardware,3\nx,2,hardware,3\n", "line 4 of the trace"),
        ("seconds,node,category,down_minutes\n-1,2,hardware,3\n", "line 2 of the trace"),
        ("seconds,node,category,down_minutes\n5,2,hardware,3\n4,2,hardware,3\n", "earlier than the one before"),
    ],
)
def test_a_bad_trace_is_refused_in_words(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(FailuresError, match=message):
        failures.read_trace(tmp_path / "trace.csv")


def test_a_missing_trace_is_refused_in_words(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FailuresError, match="cannot be read"):
        failures.read_trace(tmp_path / "none.csv")


def test_nodes_of_one_second_are_one_failure(tmp_path: pathlib.Path) -> None:
    rows = "seconds,node,category,down_minutes\n5,1,software,10\n5,2,hardware,20\n9,1,software,5\n"
    (tmp_path / "trace.csv").write_text(rows)
    first, second = failures.read_trace(tmp_path / "trace.csv")
    assert (first.nodes, first.hard, first.down_seconds) == ((1, 2), True, 1200)
    assert (second.nodes, second.hard) == ((1,), False)
