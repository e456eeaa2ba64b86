"""The small protocol that checkpoints need of a store, and the one error that all stores raise."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from typing import Literal, Protocol

Kind = Literal["full", "read-only", "stale", "gone", "stalled", "other"]

_KINDS: dict[int, tuple[Kind, str]] = {
    errno.ENOSPC: ("full", "the file system is full: free some space"),
    errno.EDQUOT: ("full", "the quota is used up: free some space or raise it"),
    errno.EFBIG: ("full", "the file is larger than the file system or a limit of the process allows"),
    errno.EROFS: ("read-only", "the file system is read-only"),
    errno.EACCES: ("read-only", "no permission: let the user that runs the job write there"),
    errno.EPERM: ("read-only", "not permitted: let the user that runs the job write there"),
    errno.ESTALE: ("stale", "the network file system has dropped the file (stale handle)"),
    errno.ENOENT: ("gone", "it is not there (any more)"),
    errno.ENOTDIR: ("gone", "it is not a folder"),
    errno.ENODEV: ("gone", "the file system is gone"),
    errno.ENOTCONN: ("gone", "the file system is not connected"),
}


class StorageError(Exception):
    """Something went wrong with the store. `kind` says what can be done about it; the text is a sentence."""

    def __init__(self, text: str, kind: Kind = "other") -> None:
        super().__init__(text)
        self.kind: Kind = kind


def from_os_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an operating-system error. `what`: "writing <path>"."""
    kind, sentence = _KINDS.get(error.errno or 0, ("other", error.strerror or str(error)))
    return StorageError(f"{what}: {sentence}", kind)


class Reader(Protocol):
    """An open file."""

    @property
    def nbytes(self) -> int:
        """Length of the file."""

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`; fewer only at the end of the file."""


class Store(Protocol):
    """
    Files by path ("a/b/c", relative to the root of the store). All methods raise StorageError.

    A listing may lag behind; nothing that matters depends on it.
    """

    def create(self, path: str, data: bytes) -> bool:
        """Create a file with this content, durably and all at once; False when there is one already."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> None:
        """
        Write a file of `nbytes`, durably. One that is there is overwritten in place and never cut short before the
        end, or replaced at once, so that writing the same bytes again harms no reader. Each piece is valid until the
        next is asked for; what the iterator raises comes through, and leaves no new file that looks whole.
        """

    def open(self, path: str) -> contextlib.AbstractContextManager[Reader]:
        """Open a file for reading; kind "gone" when it is not there."""

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty when there is no such folder."""

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; nothing happens when it is not there, or is a folder that is not empty."""

    def location(self, path: str) -> str:
        """Where the file is, for people: a path or a URL."""

    def local_path(self, path: str) -> str | None:
        """Where another process on this machine can open the file; None when only this store can read it."""


def read(store: Store, path: str) -> bytes | None:
    """The whole content of a small file, or None when it is not there."""
    try:
        with store.open(path) as file:
            return file.read_at(0, file.nbytes)
    except StorageError as error:
        if error.kind == "gone":
            return None
        raise
