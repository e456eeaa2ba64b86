"""`lastwords simulate`: forms of the answer, the same seed, presets, and refusals in words."""

from __future__ import annotations

import csv
import io
import json
import pathlib

import pytest

from lastwords_operator import cli
from lastwords_operator.simulator import compare, policies, presets

SMALL = ["simulate", "--nodes", "256", "--days", "20", "--runs", "2", "--policies", "ours,Daly,fixed 1 h"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first = answer(capsys, "--json")
    assert answer(capsys, "--json") == first
    assert answer(capsys, "--json", "--seed", "2") != first


def test_json_csv_and_table_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lines = json.loads(answer(capsys, "--json"))
    rows = list(csv.DictReader(io.StringIO(answer(capsys, "--csv"))))
    table = answer(capsys)
    assert [line["policy"] for line in lines] == ["ours", "Daly", "fixed 1 h"] == [row["policy"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert float(row["goodput"]) == line["goodput"]["mean"] and f"{line['goodput']['mean']:.2%}" in table
        spent = line["saving"] + line["redone"] + line["recovering"] + line["waiting"]
        assert line["goodput"]["mean"] + spent == pytest.approx(1)
        assert line["goodput"]["half_width"] > 0


def test_presets_say_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["simulate", "--preset", "llama3-405b", "--days", "1", "--runs", "1", "--policies", "Daly"])
    out = capsys.readouterr().out
    assert presets.PRESETS["llama3-405b"].source in out and "2048 nodes for 24 h" in out


def test_last_words_and_layout_matter(capsys: pytest.CaptureFixture[str]) -> None:
    def redone(*arguments: str) -> float:
        line = json.loads(answer(capsys, "--json", "--stall", "30", *arguments))[2]
        return float(line["redone"])

    assert redone("--layout", "ddp") < redone("--layout", "fsdp") < redone("--no-last-words")


@pytest.mark.slow
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    answer(capsys, "--plot", str(tmp_path / "pictures"))
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert set(pictures) == {"waste.png", "goodput.png", "interval.png"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in pictures.values())
    (tmp_path / "file").write_text("")
    assert cli.main([*SMALL, "--plot", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_trace_in_place_of_a_process(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    rows = "".join(f"{hour * 3600},{hour % 7},hardware,60\n" for hour in range(1, 100))
    (tmp_path / "outages.csv").write_text("seconds,node,category,down_minutes\n" + rows)
    assert "98 failures" in answer(capsys, "--trace", str(tmp_path / "outages.csv"), "--nodes", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--failures", "gauss"], "is no failure process; there are poisson"),
        (["--trace", "missing.csv"], "cannot be read"),
        (["--policies", "magic"], "is no policy; there are ours"),
        (["--nodes", "0"], "is not a whole number above 0"),
        (["--stall", "-1"], "is not a number from 0 up"),
        (["--days", "nan"], "is not a number from 0 up"),
        (["--slowdown", "2"], "is not a share"),
        (["--layout", "3d"], "is none of ddp, hsdp, fsdp"),
        (["--preset", "none"], "invalid choice"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["simulate", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_all_policies_have_a_name_for_the_command_line() -> None:
    assert compare.BEST not in policies.NAMED and "," not in "".join(policies.NAMED)
