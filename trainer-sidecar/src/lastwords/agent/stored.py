"""
Blocks of files in an object store, for the ranks of this worker, which cannot read there themselves.

The ranks open local files as they do on a file system, where the large ones have only their headers. For the blocks a
rank connects to the socket in `volume.STORED`, sends one line {"path", "blocks"}, and gets for each block, in this
order, a line {"nbytes"} and that many bytes; or a line {"error"} and the end. The ranks of a worker often want the same
blocks at about the same time: each is fetched once, a few of them ahead, and the newest are kept for a while.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import socket
import threading

from lastwords.agent.offload import Offload
from lastwords.protocol import manifest, volume
from lastwords.protocol.manifest import Manifest
from lastwords.protocol.snapshots import BLOCK_BYTES
from lastwords.storage.base import Reader, StorageError
from lastwords.storage.checkpoints import JobCheckpoints

log = logging.getLogger("lastwords.agent")

_AHEAD = 4
"""Blocks of one request that are fetched at a time."""
_KEPT = 32
"""Blocks that are kept: 256 MiB."""
_BLOCK_SECONDS = 120.0


class BlockServer:
    """Serves the files of `checkpoints` in the memory volume `folder`."""

    def __init__(self, checkpoints: JobCheckpoints, folder: str) -> None:
        self._checkpoints = checkpoints
        self._folder = os.path.join(folder, volume.STORED)
        self._offload = Offload("lastwords-restore", threads=8)
        self._blocks: collections.OrderedDict[tuple[str, int], asyncio.Task[bytes]] = collections.OrderedDict()
        self._readers: dict[str, Reader] = {}
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, unless the ranks can read the files themselves; what a dead agent left is replaced."""
        if self._checkpoints.store.local_path("") is not None:
            return
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        # Through the folder's descriptor, since a socket's path is limited to about 100 bytes.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = f"/proc/self/fd/{folder}/{volume.STORED_SOCKET}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        finally:
            os.close(folder)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=16 * 1024 * 1024)

    async def stop(self) -> None:
        """End; whoever still waits for a block sees the end of its connection."""
        if self._server is not None:
            self._server.close()
        for task in self._blocks.values():
            task.cancel()
        await asyncio.gather(*self._blocks.values(), return_exceptions=True)
        self._open.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            await self._send(str(request["path"]), [int(number) for number in request["blocks"]], writer)
        except (StorageError, ValueError, KeyError, TypeError) as error:
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        except OSError:
            pass  # the rank is gone
        finally:
            writer.close()

    async def _send(self, path: str, numbers: list[int], writer: asyncio.StreamWriter) -> None:
        if not self._checkpoints.owns(path):
            raise ValueError(f"{path} is none of this job's files")
        ahead: collections.deque[asyncio.Task[bytes]] = collections.deque()
        rest = iter(numbers)
        for _ in numbers:
            while len(ahead) < _AHEAD and (number := next(rest, None)) is not None:
                ahead.append(self._block(path, number))
            data = await asyncio.shield(ahead.popleft())
            writer.write(json.dumps({"nbytes": len(data)}).encode() + b"\n")
            writer.write(data)
            await writer.drain()

    def _block(self, path: str, number: int) -> asyncio.Task[bytes]:
        key = (path, number)
        task = self._blocks.pop(key, None)
        if task is None or (task.done() and task.exception() is not None):
            fetch = self._offload.run(lambda: self._read(path, number), _BLOCK_SECONDS)
            task = asyncio.create_task(fetch)
            task.add_done_callback(_looked_at)
        self._blocks[key] = task
        for old in [key for key, task in self._blocks.items() if task.done()][: max(len(self._blocks) - _KEPT, 0)]:
            del self._blocks[old]
        return task

    def _read(self, path: str, number: int) -> bytes:
        with self._lock:
            reader = self._readers.get(path)
        if reader is None:
            opened = self._checkpoints.store.open(path)
            with self._lock:
                reader = self._readers[path] = self._open.enter_context(opened)
        return reader.read_at(number * BLOCK_BYTES, BLOCK_BYTES)


def keep(folder: str, name: str, body: bytes) -> None:
    """A small file of a checkpoint, for the ranks to open."""
    with open(os.path.join(folder, name), "wb") as file:
        file.write(body)


def lay_out(folder: str, checkpoints: JobCheckpoints, found: Manifest) -> None:
    """
    The manifest, and of each data file the header in a file of the full length that takes no more room than that.

    Raises StorageError, CheckpointError.
    """
    keep(folder, manifest.MANIFEST, manifest.encode_manifest(found))
    for part in found.parts:
        if part.data is not None:
            keep(folder, part.data.name, checkpoints.read_header(found.id, part.data))
            os.truncate(os.path.join(folder, part.data.name), part.data.nbytes)


def _looked_at(task: asyncio.Task[bytes]) -> None:
    """Nobody may wait any more for a block that was fetched ahead."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("a block could not be fetched: %s", task.exception())
