"""
Names the delicate windows of a process in a log, so that a test can tell which one a kill has hit.

LASTWORDS_WINDOWS_LOG is the path of the log; each line is "<pid> <monotonic_ns> <rank> <window> begin|end". One
write per line with O_APPEND: lines of several processes never mix, and a SIGKILL loses none. Costs nothing when unset.
"""

from __future__ import annotations

import os
import time

LOG = "LASTWORDS_WINDOWS_LOG"

_path = os.environ.get(LOG, "")
_file = -1


def begin(window: str) -> None:
    """The window opens now."""
    if _path:
        _write(window, "begin")


def end(window: str) -> None:
    """The window is over."""
    if _path:
        _write(window, "end")


def _write(window: str, edge: str) -> None:
    global _file
    if _file < 0:
        _file = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    rank = os.environ.get("RANK", "0")
    os.write(_file, f"{os.getpid()} {time.monotonic_ns()} {rank} {window} {edge}\n".encode())
