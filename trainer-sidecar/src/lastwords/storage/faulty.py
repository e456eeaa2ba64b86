"""A store with the quirks of real ones, for tests: full, read-only, stalled, stale, half written, lagging behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from lastwords.storage import base
from lastwords.storage.base import Kind, StorageError, Store


class FaultyStore:
    """`base.Store` around another one. Faults are switched on and off by the test."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.failing: Kind | None = None
        """Every change fails like this."""
        self.stale_once = False
        """The next call, whichever, gets a stale handle."""
        self.full_after: int | None = None
        """So many bytes can still be written."""
        self.hidden: set[str] = set()
        """Names that listings do not show yet."""
        self.stalled = threading.Event()
        self.stalled.set()
        """While cleared, every call waits."""
        self.calls: list[str] = []

    def create(self, path: str, data: bytes) -> bool:
        """See `base.Store`."""
        self._begin("create", path, changes=True)
        self._take_room(path, len(data))
        return self._inner.create(path, data)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> None:
        """See `base.Store`. A file that does not fit is left half written."""
        self._begin("write", path, changes=True)
        self._inner.write(path, self._counted(path, pieces), nbytes)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[base.Reader]:
        """See `base.Store`."""
        self._begin("open", path)
        with self._inner.open(path) as reader:
            yield reader

    def list(self, path: str) -> list[str]:
        """See `base.Store`."""
        self._begin("list", path)
        return [name for name in self._inner.list(path) if name not in self.hidden]

    def remove(self, path: str) -> None:
        """See `base.Store`."""
        self._begin("remove", path, changes=True)
        self._inner.remove(path)

    def location(self, path: str) -> str:
        """See `base.Store`."""
        return self._inner.location(path)

    def local_path(self, path: str) -> str | None:
        """See `base.Store`."""
        return self._inner.local_path(path)

    def _begin(self, what: str, path: str, *, changes: bool = False) -> None:
        self.calls.append(f"{what} {path}")
        self.stalled.wait()
        if self.stale_once:
            self.stale_once = False
            raise StorageError(f"{what} {path}: stale handle", "stale")
        if changes and self.failing is not None:
            raise StorageError(f"{what} {path}: {self.failing}", self.failing)

    def _take_room(self, path: str, nbytes: int) -> None:
        if self.full_after is None:
            return
        if nbytes > self.full_after:
            raise StorageError(f"writing {path}: the file system is full: free some space", "full")
        self.full_after -= nbytes

    def _counted(self, path: str, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            self._take_room(path, len(piece))
            yield piece
