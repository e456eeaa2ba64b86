"""
The agent's end of the workers' channel: one WebSocket to the coordinator, made again whenever it ends.

Whole reports go out when something has changed and at least once a second; orders come in. A frame that cannot be
read is skipped and never ends the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from lastwords.protocol import codec
from lastwords.protocol.messages import AgentReport, Hello, WorkerOrder

log = logging.getLogger("lastwords.agent")

PATH = "/v1/agent"
URGENT_SECONDS = 0.005
CHANGE_SECONDS = 0.1
"""Boundaries alone are told this often: each report is work for the coordinator, and steps may take milliseconds."""
AT_LEAST_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_MAX_FRAME_BYTES = 64 * 1024 * 1024


class Channel:
    """`report()` makes the newest report, `on_order` takes an order. `run` is the connection's life, for ever."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        report: Callable[[], AgentReport],
        on_order: Callable[[WorkerOrder], None],
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._report = report
        self._on_order = on_order
        self._on_change = on_change
        self._away_since: float | None = time.monotonic()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def away_seconds(self) -> float:
        """For how long there has been no connection; 0 while there is one."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def changed(self, *, urgent: bool = True) -> None:
        """Something that the coordinator should know has changed."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Connect, serve, and connect again with a growing pause."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                began = time.monotonic()
                await self._connect()
                if time.monotonic() - began > _LONGEST_PAUSE_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                log.info("the coordinator cannot be reached: %s", error)
            # Workers that lost the coordinator together must not come back together.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def send_last(self) -> None:
        """One more report before the agent ends."""
        if self._socket is not None and not self._socket.closed:
            try:
                await asyncio.wait_for(self._send(self._socket, "report", self._report()), 1.0)
                await asyncio.wait_for(self._socket.close(), 1.0)
            except (ConnectionError, asyncio.TimeoutError):
                pass

    async def _connect(self) -> None:
        unix = self._address.startswith("unix:")
        connector = aiohttp.UnixConnector(self._address.removeprefix("unix:")) if unix else None
        url = f"http://coordinator{PATH}" if unix else self._address.rstrip("/") + PATH
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            connecting = session.ws_connect(url, max_msg_size=_MAX_FRAME_BYTES, compress=0)
            async with await asyncio.wait_for(connecting, 10.0) as socket:
                await self._send(socket, "hello", self._hello)
                self._socket = socket
                self._away_since = None
                self.changed()
                sender = asyncio.create_task(self._send_reports(socket))
                try:
                    await self._receive(socket)
                finally:
                    self._socket = None
                    self._away_since = time.monotonic()
                    sender.cancel()
                    await asyncio.gather(sender, return_exceptions=True)
                    self._on_change()

    async def _send_reports(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            began = time.monotonic()
            self._changed.clear()
            self._urgent.clear()
            await self._send(socket, "report", self._report())
            await _wait(self._changed, AT_LEAST_SECONDS)
            await _wait(self._urgent, CHANGE_SECONDS - (time.monotonic() - began))
            await asyncio.sleep(max(0.0, URGENT_SECONDS - (time.monotonic() - began)))

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            order = _decode(message.data)
            if order is not None:
                self._on_order(order)
        log.info("the coordinator ended the connection (%s)", socket.close_code)

    @staticmethod
    async def _send(socket: aiohttp.ClientWebSocketResponse, kind: str, message: Any) -> None:
        await socket.send_str(json.dumps({"kind": kind, **codec.to_plain(message)}, separators=(",", ":")))


def _decode(text: str) -> WorkerOrder | None:
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("kind") != "order":
            raise codec.DecodeError("not an order")
        return codec.from_plain(WorkerOrder, data, "order")
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("a frame of the coordinator cannot be read and is skipped: %s", error)
        return None


async def _wait(event: asyncio.Event, seconds: float) -> None:
    if seconds <= 0 or event.is_set():
        return
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        pass
