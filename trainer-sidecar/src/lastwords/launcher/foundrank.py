"""A rank that the launcher did not start: watched by its process id."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from lastwords.launcher.children import Child

_STATUS_SECONDS = 0.2
"""How long the end of the command is waited for when a rank's own exit status could not be seen."""


class FoundRank:
    """
    Process `pid` in the tree of `command`; `on_change` is called when it is dead.

    Its parent reaps it, not we, so its exit status can only be seen between its death and then. Where that was too
    late the command's own end usually says the same a moment later, as a shell's does.
    """

    def __init__(self, pid: int, command: Child | None, on_change: Callable[[], None]) -> None:
        self.pid = pid
        self.alive = True
        self.told = False
        """`code` and `signal` are known."""
        self.code: int | None = None
        self.signal: int | None = None
        self._command = command
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._died()
        except OSError:
            pass  # a kernel or sandbox without it: the end of its connection tells
        else:
            self._loop.add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        status = _status(self.pid)
        if status is not None:
            self.told = True
            if os.WIFSIGNALED(status):
                self.signal = os.WTERMSIG(status)
            else:
                self.code = os.WEXITSTATUS(status)
            self._tell()
        elif self._command is not None and self._command.alive:
            self._loop.call_later(_STATUS_SECONDS, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        self.alive = False
        self._on_change()


def _status(pid: int) -> int | None:
    """Wait status of a process that is dead and not reaped yet; None when it is gone, or may not be looked at."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None
