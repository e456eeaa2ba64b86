"""The ports over the job folder: status file, event file, clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lastwords.protocol import codec
from lastwords_operator.coordinator import ports
from lastwords_operator.core.model import JobStatus
from lastwords_operator.core.observation import Event
from lastwords_operator.local.folder import FolderError, JobFolder, append_line, read_json, replace_file

_log = logging.getLogger(__name__)


class FileStatusStore:
    """`ports.StatusStore`: status.json, replaced as a whole. The folder's lock keeps others from writing."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    async def load(self) -> tuple[JobStatus | None, int]:
        """What the file says. FolderError when it is damaged."""
        return read_status(self._folder)

    async def save(self, status: JobStatus, version: int) -> int:
        """Writes version + 1."""
        newest = (read_json(self._folder.status_file) or {}).get("version", 0)
        if newest != version:
            raise ports.ConflictError(f"{self._folder.status_file} has version {newest}, not {version}")
        row = {"version": version + 1, "status": status}
        replace_file(self._folder.status_file, codec.dumps(row))
        return version + 1


def read_status(folder: JobFolder) -> tuple[JobStatus | None, int]:
    """Status and version; (None, 0) where there is none yet. FolderError when the file is damaged."""
    data = read_json(folder.status_file)
    if data is None:
        return None, 0
    try:
        return codec.from_plain(JobStatus, data["status"], "status"), int(data["version"])
    except (codec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise FolderError(f"{folder.status_file} cannot be read ({error}); use another --dir") from None


class FileEvents:
    """`ports.Events`: events.jsonl, and whoever listens in this process."""

    def __init__(self, folder: JobFolder, listener: Callable[[dict[str, Any]], None]) -> None:
        self._folder = folder
        self._listener = listener

    async def emit(self, at: float, event: Event) -> None:
        """Append and tell. A full disk costs the line in the file, not the job."""
        row = {"at": at, **codec.to_plain(event)}
        try:
            append_line(self._folder.events_file, row)
        except OSError as error:
            _log.error("an event is missing in %s: %s", self._folder.events_file, error)
        self._listener(row)


class SystemClock:
    """`ports.Clock`: the wall clock of this process's start, moved on by the monotonic one."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Unix seconds."""
        return self._offset + time.monotonic()


def next_epoch(folder: JobFolder) -> int:
    """A number that grows with each coordinator. Call it with the lock held."""
    path = folder.path / "epoch"
    try:
        epoch = int(path.read_text()) + 1
    except FileNotFoundError:
        epoch = 1
    except ValueError:
        raise FolderError(f"{path} is damaged; use another --dir") from None
    replace_file(path, str(epoch).encode())
    return epoch
