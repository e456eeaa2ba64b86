"""Rows of tests/data/interval_oracles.csv."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re

PATH = pathlib.Path(__file__).resolve().parents[2] / "data" / "interval_oracles.csv"


@dataclasses.dataclass(frozen=True)
class Row:
    """One worked answer; `other` holds the inputs of the column `other_params`."""

    case: str
    cost: float
    mtbf: float
    recovery: float
    other: dict[str, str]
    answer: float
    checked: str

    def number(self, key: str, default: float = 0.0) -> float:
        """One of the other inputs."""
        return float(self.other.get(key, default))

    def listed(self, key: str) -> list[float]:
        """One of the other inputs that is a list."""
        return [float(item) for item in self.other[key].split(",")]


def read() -> list[Row]:
    """All rows."""
    lines = [line for line in PATH.read_text().splitlines() if not line.startswith("#")]
    return [_row(record) for record in csv.DictReader(lines)]


def group(letter: str, ending: str = "") -> list[Row]:
    """Rows whose case begins with the letter, followed by a digit or an underscore, and ends with `ending`."""
    return [row for row in read() if re.match(rf"{letter}[\d_]", row.case) and row.case.endswith(ending)]


def rounded_equal(answer: float, row: Row) -> bool:
    """Whether the row's answer, which is rounded to four digits, is the number's."""
    return abs(answer - row.answer) <= 6e-4 * abs(row.answer)


def _row(record: dict[str, str]) -> Row:
    pairs = re.findall(r"([A-Za-z_0-9]+)=([-\w.,/+]+)", record["other_params"])
    return Row(
        case=record["case"],
        cost=float(record["save_cost_s"] or "nan"),
        mtbf=float(record["mtbf_s"] or "nan"),
        recovery=float(record["recovery_s"] or "nan"),
        other=dict(pairs),
        answer=float(record["optimum_s"]),
        checked=record["how_checked"],
    )
