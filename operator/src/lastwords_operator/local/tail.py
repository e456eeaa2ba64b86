"""Follows a growing log file."""

from __future__ import annotations

import pathlib

MAX_LINE_BYTES = 64 * 1024


class Tail:
    """New lines of a file since this object was made, or since the last `read`. The file may not exist yet."""

    def __init__(self, path: pathlib.Path, *, from_start: bool = False) -> None:
        self._path = path
        self._rest = b""
        self._offset = path.stat().st_size if path.exists() and not from_start else 0

    def read(self) -> list[str]:
        """Whole lines; one that never ends is cut."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines]
