"""Every file in tests/scenarios: commands in, decisions out. LASTWORDS_REWRITE=1 writes them anew."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.unit.core import scenario

FOLDER = pathlib.Path(__file__).parents[2] / "scenarios"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: pathlib.Path) -> None:
    """The decisions are those that the file says."""
    wanted = scenario.parse(path.read_text())
    interpreter = scenario.Interpreter()
    real = [interpreter.run(block) for block in wanted]
    if os.environ.get("LASTWORDS_REWRITE"):
        path.write_text(scenario.render(real))
        return
    assert scenario.render(real) == path.read_text()


def test_there_are_scenarios() -> None:
    """The folder was found."""
    assert len(list(FOLDER.glob("*.txt"))) >= 12
