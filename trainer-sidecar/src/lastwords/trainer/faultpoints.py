"""
Names the delicate windows of a process in a log, so that a test can tell which one a kill has hit.

LASTWORDS_WINDOWS_LOG is the path of the log; each line is "<pid> <monotonic_ns> <rank> <window> begin|end". One
write per line with O_APPEND: lines of several processes never mix, and a SIGKILL loses none. Costs next to nothing
when unset. The variable is read at the first window: a standby interpreter imports this before it has its task.
"""

from __future__ import annotations

import os
import time

LOG = "LASTWORDS_WINDOWS_LOG"

_file: int | None = None
_OFF = -1


def begin(window: str) -> None:
    """The window opens now."""
    if _file != _OFF:
        _write(window, "begin")


def end(window: str) -> None:
    """The window is over."""
    if _file != _OFF:
        _write(window, "end")


def _write(window: str, edge: str) -> None:
    global _file
    if _file is None:
        path = os.environ.get(LOG, "")
        _file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644) if path else _OFF
    if _file != _OFF:
        rank = os.environ.get("RANK", "0")
        os.write(_file, f"{os.getpid()} {time.monotonic_ns()} {rank} {window} {edge}\n".encode())
