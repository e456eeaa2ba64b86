"""The socket in the memory volume where the launcher and the ranks of this worker find the agent."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from lastwords.protocol import codec, volume, wire

log = logging.getLogger("lastwords.agent")

LOCK = "agent.lock"
_MAX_WAITING_BYTES = 8 * 1024 * 1024
"""A stopped process reads nothing; beyond this its connection is ended, and it will get everything anew."""


class AnotherAgentError(RuntimeError):
    """An agent lives in this volume already."""


class Connection:
    """One launcher or rank. `hello` is its first message."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.hello: wire.LauncherHello | wire.RankHello | None = None

    def send(self, message: Any) -> None:
        """Send, or drop when the connection has ended."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_WAITING_BYTES:
            transport.abort()
            return
        self._writer.write(wire.encode(message))

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class LocalServer:
    """
    `on_message(connection, message)` for each message after the hello and for the hello itself; `on_end(connection)`
    when a connection that said hello is over.
    """

    def __init__(
        self, folder: str, on_message: Callable[[Connection, Any], None], on_end: Callable[[Connection], None]
    ) -> None:
        self._folder = folder
        self._on_message = on_message
        self._on_end = on_end
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._lock = -1

    def lock(self) -> None:
        """Raises AnotherAgentError. The kernel gives the lock back when this process ends, however it does."""
        self._lock = os.open(os.path.join(self._folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnotherAgentError(f"another agent serves {self._folder} already") from None

    async def start(self) -> None:
        """Listen; what a dead agent left is replaced."""
        # Through the folder's descriptor, since a socket's path is limited to about 100 bytes.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = f"/proc/self/fd/{folder}/{volume.AGENT_SOCKET}"
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        finally:
            os.close(folder)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=wire.MAX_LINE_BYTES)

    async def stop(self) -> None:
        """Hand over what was sent, and end."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        try:
            os.unlink(os.path.join(self._folder, volume.AGENT_SOCKET))
        except FileNotFoundError:
            pass

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._take(connection, line)
        except (OSError, ValueError) as error:
            log.warning("a connection in the volume ended: %s", error)
        finally:
            self._connections.discard(connection)
            writer.close()
            if connection.hello is not None:
                self._on_end(connection)

    def _take(self, connection: Connection, line: bytes) -> None:
        try:
            message = wire.decode(line)
        except codec.DecodeError as error:
            log.warning("a message cannot be read and is skipped: %s", error)
            return
        if isinstance(message, wire.LauncherHello | wire.RankHello):
            connection.hello = message
        elif connection.hello is None:
            log.warning("%s before a hello is skipped", type(message).__name__)
            return
        try:
            self._on_message(connection, message)
        except Exception:
            log.exception("handling %s failed", type(message).__name__)
