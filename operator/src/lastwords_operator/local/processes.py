"""Processes of a job as /proc shows them: found by a variable in their environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import time

CONTAINER_VARIABLE = "LASTWORDS_CONTAINER"
"""`<job uid>/<worker>/<container>` in the environment of a container and of all that it starts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A living process that carries the variable."""

    pid: int
    worker: int
    kind: str
    session: int
    arguments: tuple[str, ...]

    def is_container(self, module: str) -> bool:
        """Whether it is the container itself: it leads its session and runs `python -m <module>`."""
        return self.session == self.pid and module in self.arguments[:4]


def find(job_uid: str) -> list[Found]:
    """All living processes of the job (zombies are not among them: they have no environment)."""
    wanted = f"{CONTAINER_VARIABLE}={job_uid}/".encode()
    rows = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                for entry in (folder / "environ").read_bytes().split(b"\0"):
                    if entry.startswith(wanted):
                        rows.append(_describe(int(folder.name), entry.decode()))
                        break
    return rows


def _describe(pid: int, entry: str) -> Found:
    _, worker, kind = entry.split("/")
    arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return Found(pid=pid, worker=int(worker), kind=kind, session=os.getsid(pid), arguments=tuple(arguments))


def kill_all(job_uid: str, worker: int | None = None, deadline_seconds: float = 10.0) -> list[Found]:
    """SIGKILL all processes of the job (or worker) until none is left; returns what still was at the deadline."""
    deadline = time.monotonic() + deadline_seconds
    while found := [row for row in find(job_uid) if worker is None or row.worker == worker]:
        for process in found:
            if process.pid != os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return found
        time.sleep(0.02)
    return []
