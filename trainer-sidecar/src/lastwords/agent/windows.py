"""
Names the delicate windows of the agent in a log, in the form of `lastwords.trainer.faultpoints`.

LASTWORDS_WINDOWS_LOG is its path; a line is "<pid> <monotonic_ns> agent <window> begin|end".
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

_path = os.environ.get("LASTWORDS_WINDOWS_LOG", "")


@contextlib.contextmanager
def window(name: str) -> Iterator[None]:
    """The window is open inside of the block."""
    _write(name, "begin")
    try:
        yield
    finally:
        _write(name, "end")


def _write(name: str, edge: str) -> None:
    if not _path:
        return
    file = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, f"{os.getpid()} {time.monotonic_ns()} agent {name} {edge}\n".encode())
    finally:
        os.close(file)
