"""
The folder of a job on one machine: everything that outlives `lastwords run`.

    job.json        what was asked for: uid, spec, folder to run in
    lock            flock: only one coordinator acts; its pid is inside
    status.json     {"version", "status"}, replaced as a whole
    events.jsonl    one event a line
    injected.jsonl  faults that `--inject` has already made
    token           secret of the job: agents show it
    logs/           rank logs, agent and launcher logs
    checkpoints/    storage, where none is named
    runtime         pointer to the folder of the coordinator's socket (socket paths may have 107 bytes only)
    memory          pointer to the folder of the workers' memory volumes
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from typing import Any

SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""
DEFAULT_MEMORY = pathlib.Path("/dev/shm")


class FolderError(Exception):
    """The folder cannot be used; the text says why and what to do."""


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Write the whole file or nothing (only its owner may read it): readers see the old bytes or the new ones."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_json(path: pathlib.Path) -> Any:
    """The parsed file, or None where there is none. FolderError when it is damaged."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise FolderError(f"{path} is damaged ({error}); use another --dir") from None


def append_line(path: pathlib.Path, value: Any) -> None:
    """Add one line of JSON in one write, so that lines never mix. A torn last line is closed first."""
    line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(handle, line)
    finally:
        os.close(handle)


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """All whole lines; a torn one is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


class JobFolder:
    """Paths and small files of one job folder. Making one touches nothing."""

    def __init__(self, path: pathlib.Path, memory: pathlib.Path | None = None) -> None:
        self.path = path.resolve()
        self.key = hashlib.sha256(str(self.path).encode()).hexdigest()[:12]
        self._memory = memory
        self._lock: int | None = None

    # --- places -------------------------------------------------------------------------------------

    @property
    def job_file(self) -> pathlib.Path:
        """What was asked for."""
        return self.path / "job.json"

    @property
    def status_file(self) -> pathlib.Path:
        """The job's status."""
        return self.path / "status.json"

    @property
    def events_file(self) -> pathlib.Path:
        """What happened."""
        return self.path / "events.jsonl"

    @property
    def injected_file(self) -> pathlib.Path:
        """Injected faults."""
        return self.path / "injected.jsonl"

    @property
    def token_file(self) -> pathlib.Path:
        """The job's secret."""
        return self.path / "token"

    @property
    def logs(self) -> pathlib.Path:
        """Where all logs go."""
        return self.path / "logs"

    @property
    def runtime(self) -> pathlib.Path:
        """Short folder for the coordinator's socket and what viewers read."""
        base = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
        return base / f"lastwords-{os.getuid()}" / self.key

    @property
    def socket(self) -> pathlib.Path:
        """The coordinator's socket."""
        return self.runtime / "coordinator.sock"

    @property
    def view_file(self) -> pathlib.Path:
        """What the acting coordinator shows, for others to show too."""
        return self.runtime / "view.json"

    @property
    def memory(self) -> pathlib.Path:
        """Folder of the memory volumes: the one used before, else in --memory-dir, else in /dev/shm."""
        with contextlib.suppress(OSError):
            recorded = (self.path / "memory").read_text().strip()
            if recorded:
                return pathlib.Path(recorded)
        return (self._memory or DEFAULT_MEMORY).resolve() / f"lastwords-{os.getuid()}-{self.key}"

    def volume(self, worker: int) -> pathlib.Path:
        """Memory volume of a worker."""
        return self.memory / f"worker-{worker}"

    # --- life ---------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether a job was ever started here."""
        return self.job_file.exists()

    def prepare(self) -> None:
        """Make the folders (idempotent). Raises FolderError where that is not possible or not safe."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            _make_private(self.runtime.parent)
            _make_private(self.runtime)
            _make_private(self.memory)
            replace_file(self.path / "runtime", f"{self.runtime}\n".encode())
            replace_file(self.path / "memory", f"{self.memory}\n".encode())
        except OSError as error:
            raise FolderError(f"cannot use {error.filename or self.path}: {error.strerror}") from None
        for path in (self.socket, self.volume(9999) / "agent.sock"):
            if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
                raise FolderError(
                    f"{path} is too long for a socket ({len(os.fsencode(path))} of at most {SOCKET_PATH_BYTES} bytes); "
                    "use a shorter --memory-dir or XDG_RUNTIME_DIR"
                )
        if not self.token_file.exists():
            replace_file(self.token_file, f"{secrets.token_hex(16)}\n".encode())

    def token(self) -> str:
        """The job's secret."""
        return self.token_file.read_text().strip()

    def lock(self) -> bool:
        """Become the only one who acts. False: somebody else is."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle
        return True

    def unlock(self) -> None:
        """Stop being the one who acts."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def locked_by(self) -> int | None:
        """Process that acts on the folder now, or None."""
        try:
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(handle, 32, 0).decode().strip()
            return int(text) if text.isdigit() else 0
        finally:
            os.close(handle)
        return None

    def remove_volumes(self) -> None:
        """Free the memory: only when nothing in it is needed any more."""
        shutil.rmtree(self.memory, ignore_errors=True)

    def remove_runtime(self) -> None:
        """Remove sockets and viewers' files."""
        shutil.rmtree(self.runtime, ignore_errors=True)


def _make_private(path: pathlib.Path) -> None:
    """
    A folder of ours that nobody else can enter.

    Its parent may be writable by all: a folder that somebody else prepared there is refused.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FolderError(f"{path} belongs to somebody else; remove it or set XDG_RUNTIME_DIR or --memory-dir")
    if found.st_mode & 0o077:
        path.chmod(0o700)


def memory_room(folder: JobFolder) -> tuple[int, int]:
    """Bytes that are free in the file system of the memory volumes, and bytes that our volumes take in it."""
    usage = os.statvfs(folder.memory)
    taken = sum(path.stat().st_blocks * 512 for path in folder.memory.rglob("*") if path.is_file())
    return usage.f_bavail * usage.f_frsize, taken
