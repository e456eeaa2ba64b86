"""The `lastwords` command with workers that only pretend."""

from __future__ import annotations

import pathlib
import sys

from lastwords_operator import cli
from lastwords_operator.local import workers
from lastwords_operator.local.folder import JobFolder

FAKE = pathlib.Path(__file__).with_name("fake_worker.py")
_arguments = workers.Recipe.arguments


def arguments(self: workers.Recipe, folder: JobFolder, worker: int, kind: str, incarnation: str) -> list[str]:
    """The real command line, with the module replaced."""
    real = _arguments(self, folder, worker, kind, incarnation)
    assert real[1] == "-m"
    return [real[0], str(FAKE), *real[2:]]


if __name__ == "__main__":
    workers.Recipe.arguments = arguments  # type: ignore[method-assign]
    sys.exit(cli.main())
