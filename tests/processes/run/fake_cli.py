"""The `lastwords` command with workers that only pretend."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from lastwords_operator import cli, interrupts

FAKE = pathlib.Path(__file__).with_name("fake_worker.py")


def pretend() -> None:
    """Have the command start the fake in place of agent and launcher."""
    from lastwords_operator.local import workers

    real = workers.Recipe.arguments

    def arguments(self: workers.Recipe, *place: Any) -> list[str]:
        line = real(self, *place)
        assert line[1] == "-m"
        return [line[0], str(FAKE), *line[2:]]

    workers.Recipe.arguments = arguments  # type: ignore[method-assign]


if __name__ == "__main__":
    with interrupts.counted():  # as the command itself does before its imports
        pretend()
        sys.exit(cli.main())
