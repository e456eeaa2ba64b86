"""
The windows log: which process was in which delicate moment, and when.

Trainer and agent append "<pid> <monotonic_ns> <rank or agent> <window> begin|end" when LASTWORDS_WINDOWS_LOG is set.
"""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Mark:
    """One line of the log."""

    pid: int
    nanoseconds: int
    who: str
    window: str
    begins: bool


class WindowsLog:
    """Reads the log as it grows."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.path.touch()
        self._offset = 0
        self._rest = b""
        self.open: dict[int, dict[str, Mark]] = {}
        """Windows that are open now, by process."""
        self.durations: dict[str, list[int]] = {}

    def read(self) -> list[Mark]:
        """New marks since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        marks = []
        for line in lines:
            fields = line.decode().split()
            if len(fields) == 5:
                mark = Mark(int(fields[0]), int(fields[1]), fields[2], fields[3], fields[4] == "begin")
                marks.append(mark)
                self._take(mark)
        return marks

    def _take(self, mark: Mark) -> None:
        windows = self.open.setdefault(mark.pid, {})
        if mark.begins:
            windows[mark.window] = mark
        elif mark.window in windows:
            began = windows.pop(mark.window)
            self.durations.setdefault(mark.window, []).append(mark.nanoseconds - began.nanoseconds)

    def typical_seconds(self, window: str) -> float:
        """Median length of a window so far; a guess before the first one has ended."""
        known = sorted(self.durations.get(window, [])[-50:])
        return known[len(known) // 2] / 1e9 if known else 0.005

    def forget(self, pid: int) -> set[str]:
        """The process is dead: which windows it died in."""
        return set(self.open.pop(pid, {}))
