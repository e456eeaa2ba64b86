"""One process that may become a rank, from the moment it is asked for."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from lastwords.launcher.children import Child
from lastwords.launcher.output import Stream

_NEVER_BORN = 126
"""Exit code that is told of a process that never came to be."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Standby:
    """
    A process that may become a rank. It says over `channel`, a line each: "born" and its process id when it was
    forked, "ready" when everything is imported, "taken" when it has its task.
    """

    stream: Stream
    channel: socket.socket
    at_load: dict[str, str]
    """Variables it was started with that cannot be changed later."""
    child: Child | None = None
    """None until a forked process has told its number."""
    requested: bool = True
    """Somebody is at making it; before that it can be called off."""
    lost: bool = False
    """It will never be born."""
    ready: bool = False
    taken: bool = False
    """It has confirmed its task: what happens to it from now on happened to a rank."""
    on_exit: Callable[[], None] = lambda: None
    _signals: list[int] = dataclasses.field(default_factory=list)
    _heard: bytes = b""

    @property
    def pid(self) -> int:
        """Its number; 0 while it has none."""
        return self.child.pid if self.child is not None else 0

    @property
    def alive(self) -> bool:
        """It lives, or is still to be born."""
        return self.child.alive if self.child is not None else not self.lost

    @property
    def code(self) -> int | None:
        """Exit code, once it is dead."""
        if self.child is not None:
            return self.child.code
        return _NEVER_BORN if self.lost and not self._signals else None

    @property
    def signal(self) -> int | None:
        """The signal that it died of."""
        if self.child is not None:
            return self.child.signal
        return self._signals[-1] if self.lost and self._signals else None

    def gone(self) -> bool:
        """Neither it nor any process of its group is left, or will come."""
        return self.child.gone() if self.child is not None else self.lost

    def signal_group(self, number: int) -> None:
        """A signal to it and everything in its process group; one that is not born yet gets it at its birth."""
        if self.child is not None:
            self.child.signal_group(number)
            return
        self._signals.append(number)
        if not self.requested:
            self.lose()

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        self.signal_group(signal.SIGKILL)

    def hand_over(self, task: Mapping[str, Any]) -> None:
        """Make it a rank. Raises OSError when it is dead already."""
        self.channel.setblocking(True)
        self.channel.settimeout(5.0)
        self.channel.sendall(json.dumps(task).encode() + b"\n")
        self.channel.setblocking(False)

    def born(self, child: Child) -> None:
        """It is there."""
        self.child = child
        for number in self._signals:
            child.signal_group(number)

    def lose(self) -> None:
        """It will never be born."""
        if self.child is None and not self.lost:
            self.lost = True
            self.on_exit()

    def hear(self) -> tuple[list[str], bool]:
        """What it has said since, and whether it may say more."""
        lines: list[str] = []
        while True:
            try:
                data = self.channel.recv(256)
            except BlockingIOError:
                return lines, True
            except OSError:
                data = b""
            if not data:
                return lines, False
            *whole, self._heard = (self._heard + data).split(b"\n")
            for line in whole:
                self.ready = self.ready or line == b"ready"
                self.taken = self.taken or line == b"taken"
                lines.append(line.decode())
