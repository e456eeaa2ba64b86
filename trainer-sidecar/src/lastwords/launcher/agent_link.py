"""The launcher's connection to the agent: JSON lines over the socket in the volume, made again when it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from lastwords.protocol import codec, volume, wire

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class AgentLink:
    """`greeting()` gives the first messages of each connection; `handle` takes what the agent says."""

    def __init__(
        self,
        folder: str,
        greeting: Callable[[], Iterable[Any]],
        handle: Callable[[Any], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._greeting = greeting
        self._handle = handle
        self._say = say
        self._writer: asyncio.StreamWriter | None = None
        self._away_since: float | None = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: Any) -> None:
        """Send, or drop when there is no agent: the greeting repeats what matters."""
        if self._writer is not None:
            self._writer.write(wire.encode(message))

    def away_seconds(self) -> float:
        """For how long there has been no agent; 0 while there is one."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    async def close(self, timeout_seconds: float) -> None:
        """Hand over what was sent, for at most that long, and end."""
        if self._writer is not None:
            try:
                await asyncio.wait_for(self._writer.drain(), timeout_seconds)
            except (OSError, asyncio.TimeoutError):
                pass
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                reader, writer = await self._connect()
            except OSError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            pause = _FIRST_PAUSE_SECONDS
            try:
                await self._serve(reader, writer)
            except OSError:
                pass
            finally:
                self._writer = None
                self._away_since = time.monotonic()
                writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # Through the folder's descriptor, since a socket's path is limited to about 100 bytes.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{folder}/{volume.AGENT_SOCKET}"
            return await asyncio.open_unix_connection(path, limit=wire.MAX_LINE_BYTES)
        finally:
            os.close(folder)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for message in self._greeting():
            writer.write(wire.encode(message))
        self._writer = writer
        self._away_since = None
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                self._say("the agent sent a line that is too long; connecting again")
                return
            if not line.endswith(b"\n"):
                return
            try:
                message = wire.decode(line)
            except codec.DecodeError as error:
                self._say(f"a message of the agent cannot be read: {error}")
                continue
            self._handle(message)
