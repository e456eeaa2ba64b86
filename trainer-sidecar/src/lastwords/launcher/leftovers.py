"""
Finding and killing what a launcher's processes left behind, by the marks in their environment.

Also run as a program of its own, the *guard*: it waits until its launcher is gone, however that died, and kills what
that launcher had started. Ranks die with the launcher by themselves; their children (loader processes) would not.
The guard runs as a plain file in an isolated interpreter, so this module imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection

_PASSES_WITHOUT_FIND = 3
_PAUSE_SECONDS = 0.02
_GIVE_UP_SECONDS = 10.0


def find(marks: Collection[str], keep: Collection[int] = ()) -> list[int]:
    """Process ids whose environment has all `marks` ("NAME=value", or "NAME=" for any value); not those in `keep`."""
    own = os.getpid()
    wanted = [b"\0" + mark.encode() + (b"" if mark.endswith("=") else b"\0") for mark in marks]
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own or int(name) in keep:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = b"\0" + file.read() + b"\0"
        except OSError:
            continue  # gone, or not ours
        # A zombie's environment reads as empty: it is not found, which is right.
        if all(mark in environment for mark in wanted):
            found.append(int(name))
    return found


def below(ancestor: int, keep: Collection[int] = ()) -> set[int]:
    """Living processes that descend from `ancestor`; not those in `keep`, nor what is below these."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue  # gone
        children.setdefault(int(fields[1]), []).append((int(name), fields[0] not in (b"Z", b"X")))
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        for child, alive in children.get(waiting.pop(), ()):
            if child not in keep:
                # A dying process still has its children until the kernel has taken it apart.
                waiting.append(child)
                if alive:
                    found.add(child)
    return found


def kill(process_ids: Collection[int]) -> None:
    """SIGKILL to each that still exists."""
    for process_id in process_ids:
        try:
            os.kill(process_id, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def guard(mark: str) -> None:
    """Wait for the end of standard input, then kill whatever has `mark` until nothing more turns up."""
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    empty = 0
    # More than one pass: a process may be between fork and exec, or fork once more before it dies.
    while empty < _PASSES_WITHOUT_FIND and time.monotonic() < deadline:
        found = find([mark])
        kill(found)
        empty = 0 if found else empty + 1
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.argv[1])
