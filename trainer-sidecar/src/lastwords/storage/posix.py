# ruff: noqa: A005
"""
A folder of a POSIX file system as a store.

A file is created at once by `link()` of a finished, synced temporary file. Where links do not work it is created
exclusively and written in place; readers then tell a torn file by the checksum in it, and whoever wants to create the
same bytes finishes what a dead writer began. Never by `rename`, which overwrites, and which mounted buckets imitate.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator

from lastwords.storage import base

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
_TEMPORARY = ".lastwords-"


class _File:
    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self.nbytes = os.fstat(descriptor).st_size

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See `base.Reader`."""
        found = []
        while nbytes > 0:
            try:
                data = os.pread(self._descriptor, nbytes, offset)
            except OSError as error:
                raise base.from_os_error(error, f"reading {self._path}") from error
            if not data:
                break
            found.append(data)
            offset += len(data)
            nbytes -= len(data)
        return found[0] if len(found) == 1 else b"".join(found)


class PosixStore:
    """
    `base.Store` in the folder `root`, which is made at the first write and never again: were it gone later, as a
    network mount may be, the files would go to another disk. `on_step(name)` is called after every system call that
    changes something: tests stop the writer there.
    """

    def __init__(self, root: str | os.PathLike[str], on_step: Callable[[str], None] | None = None) -> None:
        self.root = os.path.abspath(root)
        self._on_step = on_step
        self._links: bool | None = None
        self._made = False

    def create(self, path: str, data: bytes) -> bool:
        """See `base.Store`."""
        target = self.location(path)
        with _translated(f"creating {target}"):
            self._make_folder(os.path.dirname(target))
            if self.links():
                return self._create_by_link(target, data)
            return self._create_exclusively(target, data)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> None:
        """See `base.Store`."""
        target = self.location(path)
        with _translated(f"writing {target}"):
            self._make_folder(os.path.dirname(target))
            existed = os.path.exists(target)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                position = 0
                for piece in pieces:
                    position += self._write_all(descriptor, piece)
                if os.fstat(descriptor).st_size != position:
                    os.ftruncate(descriptor, position)
                    self._step("truncate")
                os.fsync(descriptor)
                self._step("fsync")
            finally:
                os.close(descriptor)
            if not existed:
                self._sync_folder(os.path.dirname(target))

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[base.Reader]:
        """See `base.Store`."""
        target = self.location(path)
        with _translated(f"opening {target}"):
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _File(descriptor, target)
        finally:
            os.close(descriptor)

    def list(self, path: str) -> list[str]:
        """See `base.Store`."""
        target = self.location(path)
        with _translated(f"listing {target}"):
            try:
                return sorted(name for name in os.listdir(target) if not name.startswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def remove(self, path: str) -> None:
        """See `base.Store`."""
        target = self.location(path)
        with _translated(f"removing {target}"):
            try:
                os.unlink(target)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):
                if not os.path.isdir(target):
                    raise
                self._remove_folder(target)
            self._step("remove")

    def location(self, path: str) -> str:
        """See `base.Store`."""
        return os.path.join(self.root, *path.split("/"))

    def local_path(self, path: str) -> str | None:
        """See `base.Store`."""
        return self.location(path)

    def links(self) -> bool:
        """Whether `link()` works and refuses an existing name here; tried once."""
        if self._links is None:
            with _translated(f"trying links in {self.root}"):
                os.makedirs(self.root, exist_ok=True)
                self._links = self._probe()
        return self._links

    # -- steps ------------------------------------------------------------------------------------

    def _probe(self) -> bool:
        name = os.path.join(self.root, f"{_TEMPORARY}probe-{secrets.token_hex(6)}")
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.link(name, name + "-2")
            try:
                os.link(name, name + "-2")
            except FileExistsError:
                return True
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        finally:
            for left in (name, name + "-2"):
                with contextlib.suppress(OSError):
                    os.unlink(left)

    def _create_by_link(self, target: str, data: bytes) -> bool:
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f"{_TEMPORARY}{name}-{secrets.token_hex(6)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                self._write_all(descriptor, data)
                os.fsync(descriptor)
                self._step("fsync")
            finally:
                os.close(descriptor)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            self._step("link")
            self._sync_folder(folder)
            return True
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _create_exclusively(self, target: str, data: bytes) -> bool:
        try:
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._step("create")
        except FileExistsError:
            descriptor = os.open(target, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Somebody else may have met our file while it was still empty: one of us fills it, the other finds that.
            _lock(descriptor)
            found = os.pread(descriptor, len(data) + 1, 0)
            if len(found) >= len(data) or not data.startswith(found):
                return False
            self._write_all(descriptor, data)
            os.fsync(descriptor)
            self._step("fsync")
            # Where locks do not work either, only whoever finds its own bytes has created the file.
            mine = os.pread(descriptor, len(data) + 1, 0) == data
        finally:
            os.close(descriptor)
        self._sync_folder(os.path.dirname(target))
        return mine

    def _write_all(self, descriptor: int, data: bytes | memoryview) -> int:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
            self._step("write")
        return done

    def _make_folder(self, folder: str, *, above: bool = False) -> None:
        """`above`: it is one above the root."""
        # Read before the look: another thread may make it in between.
        made = self._made
        if os.path.isdir(folder):
            self._made = self._made or not above
            return
        if folder == self.root and made:
            raise base.StorageError(f"the storage folder {folder} is not there (any more)", "gone")
        parent = os.path.dirname(folder)
        self._make_folder(parent, above=above or folder == self.root)
        try:
            os.mkdir(folder)
        except FileExistsError:
            return
        self._made = self._made or not above
        self._step("mkdir")
        self._sync_folder(parent)

    def _sync_folder(self, folder: str) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync a folder; their renames and links are synchronous.
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
        self._step("fsync folder")

    def _remove_folder(self, folder: str) -> None:
        for name in os.listdir(folder):
            if name.startswith(_TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _step(self, name: str) -> None:
        if self._on_step is not None:
            self._on_step(name)


def _lock(descriptor: int) -> None:
    """Until the file is closed, or this process dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise base.from_os_error(error, what) from error
