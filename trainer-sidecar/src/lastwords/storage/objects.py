"""
A prefix in an object store (S3, Google Cloud Storage, Azure Blob Storage) as a store.

A put is whole or not there, so nothing torn can be seen; a file is created by a put that the server refuses when the
name is taken. Large files go up in parts of a multipart upload, which appears when its last request is done. Folders
are only prefixes of names.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import obstore
import obstore.store
from obstore import exceptions

from lastwords.storage import base

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

PART_BYTES = 8 * 1024 * 1024
"""Bytes of one part of an upload; what is not larger goes up in one put."""
MOST_PARTS = 10_000
"""S3 takes no more parts of one upload."""
_PARTS_AT_ONCE = 4
_REQUEST_SECONDS = 30
_RETRY_SECONDS = 20
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")


class ObjectStore:
    """
    `base.Store` below `url`, by a client of obstore. `on_step(name)` is called after every request that changes
    something, and after every piece of an upload: tests stop the writer there.
    """

    def __init__(self, client: Client, url: str, on_step: Callable[[str], None] | None = None) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._on_step = on_step

    def create(self, path: str, data: bytes) -> bool:
        """
        See `base.Store`.

        Also False when an earlier try of the same call got through and only its answer was lost: whoever asks compares.
        """
        with _translated(f"creating {self.location(path)}"):
            try:
                obstore.put(self._client, path, data, mode="create")
            except exceptions.AlreadyExistsError:
                return False
        self._step("create")
        return True

    def write(self, path: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> None:
        """See `base.Store`."""
        with _translated(f"writing {self.location(path)}"):
            if nbytes <= PART_BYTES:
                obstore.put(self._client, path, b"".join(self._copied(pieces)), use_multipart=False)
            else:
                obstore.put(
                    self._client,
                    path,
                    self._copied(pieces),
                    use_multipart=True,
                    chunk_size=part_bytes(nbytes),
                    max_concurrency=_PARTS_AT_ONCE,
                )
        self._step("put")

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[base.Reader]:
        """See `base.Store`."""
        with _translated(f"opening {self.location(path)}"):
            nbytes = obstore.head(self._client, path)["size"]
        yield _Object(self._client, path, nbytes, self.location(path))

    def list(self, path: str) -> list[str]:
        """See `base.Store`."""
        folder = "" if path == "." else path
        with _translated(f"listing {self.location(path)}"):
            found = obstore.list_with_delimiter(self._client, folder or None)
        names = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return sorted({name.rpartition("/")[2] for name in names})

    def remove(self, path: str) -> None:
        """See `base.Store`."""
        with _translated(f"removing {self.location(path)}"):
            try:
                obstore.delete(self._client, path)
            except FileNotFoundError:
                return
        self._step("remove")

    def location(self, path: str) -> str:
        """See `base.Store`."""
        return f"{self._url}/{path}" if path else self._url

    def local_path(self, path: str) -> str | None:
        """See `base.Store`."""
        return None

    def _copied(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        """The client keeps what it is given until it is sent, and a piece is valid only until the next one."""
        for piece in pieces:
            yield bytes(piece)
            self._step("piece")

    def _step(self, name: str) -> None:
        if self._on_step is not None:
            self._on_step(name)


class _Object:
    def __init__(self, client: Client, path: str, nbytes: int, location: str) -> None:
        self._client = client
        self._path = path
        self._location = location
        self.nbytes = nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See `base.Reader`."""
        end = min(offset + nbytes, self.nbytes)
        if offset >= end:
            return b""
        with _translated(f"reading {self._location}"):
            return bytes(obstore.get_range(self._client, self._path, start=offset, end=end))


def connect(url: str, on_step: Callable[[str], None] | None = None) -> ObjectStore:
    """
    The store at s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.

    Credentials, region and endpoint come from the standard variables (AWS_…, GOOGLE_…, AZURE_…). Raises StorageError
    when they do not suffice to make a client.
    """
    # A plain endpoint, of a server in one's own network, has to be asked for by its http:// alone.
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://") and url.startswith("s3://")
    try:
        client = obstore.store.from_url(
            url,
            client_options={"timeout": f"{_REQUEST_SECONDS}s", **({"allow_http": True} if plain else {})},
            retry_config={"max_retries": 5, "retry_timeout": datetime.timedelta(seconds=_RETRY_SECONDS)},
        )
    except (exceptions.BaseError, ValueError) as error:
        names = {"s3": "AWS_…", "gs": "GOOGLE_…", "az": "AZURE_…"}[url.partition("://")[0]]
        raise base.StorageError(f"{url}: {_reason(error)}: check the variables {names} of the environment") from None
    return ObjectStore(client, url, on_step)


def part_bytes(nbytes: int) -> int:
    """Bytes of each part of an upload of `nbytes`, so that the store's limit of parts is kept."""
    return max(PART_BYTES, -(-nbytes // MOST_PARTS))


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (exceptions.BaseError, FileNotFoundError) as error:
        raise _storage_error(error, what) from error


def _storage_error(error: Exception, what: str) -> base.StorageError:
    reason = _reason(error)
    if any(mark in str(error) for mark in _MISSING_BUCKET):
        return base.StorageError(f"{what}: {reason}: make the bucket first", "gone")
    if isinstance(error, FileNotFoundError):
        return base.StorageError(f"{what}: it is not there (any more)", "gone")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return base.StorageError(f"{what}: {reason}: give the job credentials that may do so", "read-only")
    if "timed out" in str(error):
        return base.StorageError(f"{what}: it did not answer in time", "stalled")
    return base.StorageError(f"{what}: {reason}", "other")


def _reason(error: Exception) -> str:
    """What the server says, in one line; the client's texts hold whole answers."""
    text = str(error).partition("\n\nDebug source")[0]
    said = re.search(r"<Message>([^<]+)</Message>", text)
    if said is not None:
        return said[1].strip().rstrip(".")
    first = text.strip().partition("\n")[0]
    return re.sub(r"^Generic \w+ error: ", "", first.rpartition(" - ")[2]).rstrip(".: ")
