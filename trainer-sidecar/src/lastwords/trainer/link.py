"""
The connection of a rank to its agent: JSON lines over the unix socket, made again when the agent comes back.

`send` never blocks: what the socket does not take at once is written by the link's own thread. A stopped agent must
not stop training.
"""

from __future__ import annotations

import collections
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lastwords.protocol import codec, volume, wire

log = logging.getLogger("lastwords")

_MAX_QUEUED = 256
"""Boundaries beyond this many waiting messages are dropped: only the newest says something."""


class Link:
    """`greeting()` gives the first messages of each connection, `handle` takes what the agent says."""

    def __init__(self, folder: str, greeting: Callable[[], Iterable[Any]], handle: Callable[[Any], None]) -> None:
        self._folder = folder
        self._greeting = greeting
        self._handle = handle
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._outbox: collections.deque[bytes] = collections.deque()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._closing = False
        self._away_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lastwords-link", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=2.0)

    def away_seconds(self) -> float:
        """For how long there has been no connection; 0 while there is one."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def send(self, message: Any) -> None:
        """Send, or drop when there is no connection (the greeting repeats what matters)."""
        line = wire.encode(message)
        with self._lock:
            if self._socket is None:
                return
            if isinstance(message, wire.Boundary) and len(self._outbox) > _MAX_QUEUED:
                return
            self._outbox.append(line)
            if self._flush():
                return
        self._wake()

    def _flush(self) -> bool:
        """Write what the socket takes now; True when nothing is left. The lock is held."""
        while self._outbox and self._socket is not None:
            line = self._outbox[0]
            try:
                sent = self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # The reading side sees the end of the connection and makes a new one.
                self._outbox.clear()
                return True
            if sent < len(line):
                self._outbox[0] = line[sent:]
                return False
            self._outbox.popleft()
        return True

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except OSError:
            pass

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = 0.01
        while not self._closing:
            connection = self._connect()
            if connection is None:
                time.sleep(delay)
                delay = min(2 * delay, 0.5)
                continue
            delay = 0.01
            try:
                self._serve(connection)
            except OSError:
                pass
            finally:
                self._drop(connection)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Through the folder's descriptor, since a socket's path is limited to about 100 bytes.
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            connection.close()
            return None
        try:
            connection.connect(f"/proc/self/fd/{folder}/{volume.AGENT_SOCKET}")
        except OSError:
            connection.close()
            return None
        finally:
            os.close(folder)
        connection.setblocking(False)
        with self._lock:
            self._socket = connection
            self._outbox.clear()
            self._outbox.extend(wire.encode(message) for message in self._greeting())
            self._flush()
        self._away_since = None
        return connection

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = None
            self._outbox.clear()
        self._away_since = time.monotonic()
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._closing:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
                selector.modify(connection, wanted)
                for key, events in selector.select():
                    if key.fileobj is self._wake_out:
                        self._wake_out.recv(4096)
                    elif events & selectors.EVENT_READ:
                        data = connection.recv(1 << 16)
                        if not data:
                            return
                        *lines, pending = (pending + data).split(b"\n")
                        for line in lines:
                            self._take(line)
                with self._lock:
                    self._flush()

    def _take(self, line: bytes) -> None:
        try:
            message = wire.decode(line)
        except codec.DecodeError as error:
            log.warning("lastwords: a message of the agent cannot be read: %s", error)
            return
        try:
            self._handle(message)
        except Exception:
            log.exception("lastwords: handling %s failed", type(message).__name__)
