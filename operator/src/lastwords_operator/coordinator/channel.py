"""
The workers' channel: one WebSocket per worker, opened by its agent, `GET /v1/agent`.

Agents send `hello` once and then whole reports, of which the newest is kept; orders are pushed whole whenever they
differ from the last one sent on that connection, so a new connection gets them again. A frame that cannot be read is
counted and skipped: it never ends a connection, or one bad field would look like a dead node.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import WSMsgType, web

from lastwords.protocol import codec
from lastwords.protocol.messages import AgentReport, Hello, WorkerOrder

PATH = "/v1/agent"
HELLO_SECONDS = 10.0
SWEEP_SECONDS = 0.25
MAX_FRAME_BYTES = 64 * 1024 * 1024
CLOSE_REFUSED = 4401
CLOSE_REPLACED = 4409

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """What the channel knows of one worker. `silent_seconds`: since its last frame, own stalls not counted."""

    worker: int
    incarnation: str
    agent_run: str
    connected: bool
    silent_seconds: float
    report: AgentReport | None


class AwakeClock:
    """
    Seconds in which this process was awake.

    A sweep that comes late means that frames lie unread in the sockets. That time must not count as anybody's
    silence, or a stall of the loop looks like dead workers. Each sweep therefore adds at most twice its period.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, period_seconds: float = SWEEP_SECONDS) -> None:
        self._clock = clock
        self._period = period_seconds
        self._last = clock()
        self._awake = 0.0
        self.late_seconds = 0.0
        """Total lateness so far."""

    def sweep(self) -> None:
        """Account for the time since the last sweep; called about every period."""
        now = self._clock()
        gone = now - self._last
        counted = min(gone, 2 * self._period)
        self._awake += counted
        self.late_seconds += gone - counted
        self._last = now

    def seconds(self) -> float:
        """Awake seconds up to now."""
        return self._awake + min(self._clock() - self._last, 2 * self._period)


class _Connection:
    """One open socket: sends the newest wanted order, when it is not the last one sent."""

    def __init__(self, socket: web.WebSocketResponse, hello: Hello) -> None:
        self.socket = socket
        self.hello = hello
        self._wanted: WorkerOrder | None = None
        self._sent: WorkerOrder | None = None
        self._changed = asyncio.Event()

    def want(self, order: WorkerOrder) -> None:
        self._wanted = order
        if order != self._sent:
            self._changed.set()

    async def send_orders(self) -> None:
        """Runs as long as the connection; a slow worker delays only itself."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            order = self._wanted
            if order is not None and order != self._sent:
                await self.socket.send_str(encode_frame("order", order))
                self._sent = order


@dataclasses.dataclass
class _Link:
    hello: Hello
    heard_at: float
    report: AgentReport | None = None
    connection: _Connection | None = None


class Channel:
    """
    Server side of the channel. `admit(hello)` returns why a worker is refused, or "".

    `on_change` is called whenever a report came in or a connection began or ended.
    """

    def __init__(self, *, admit: Callable[[Hello], str], on_change: Callable[[], None]) -> None:
        self._admit = admit
        self._on_change = on_change
        self._links: dict[int, _Link] = {}
        self._orders: dict[int, WorkerOrder] = {}
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.awake = AwakeClock()
        self.bad_frames = 0

    # --- what the coordinator uses ------------------------------------------------------------------

    def heard(self) -> dict[int, Heard]:
        """The newest knowledge of every worker that ever said hello to this channel."""
        now = self.awake.seconds()
        return {
            worker: Heard(
                worker=worker,
                incarnation=link.hello.incarnation,
                agent_run=link.hello.agent_run,
                connected=link.connection is not None,
                silent_seconds=max(0.0, now - link.heard_at),
                report=link.report,
            )
            for worker, link in self._links.items()
        }

    def push(self, orders: Mapping[int, WorkerOrder]) -> None:
        """Make these the wanted orders; workers that are away get them when they are back."""
        self._orders = dict(orders)
        for worker, order in self._orders.items():
            link = self._links.get(worker)
            if link is not None and link.connection is not None:
                link.connection.want(order)

    async def start(self, socket_path: pathlib.Path) -> None:
        """Listen on a unix socket; a left-over socket file of a dead coordinator is replaced."""
        app = web.Application()
        app.router.add_get(PATH, self._serve)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(socket_path)).start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close all connections and the socket."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in list(self._links.values()):
            if link.connection is not None:
                await link.connection.socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- connections --------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.awake.sweep()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False, max_msg_size=MAX_FRAME_BYTES)
        await socket.prepare(request)
        try:
            hello = await self._receive_hello(socket)
            if hello is None:
                return socket
            connection = await self._attach(socket, hello)
        except (ConnectionError, TimeoutError):
            return socket
        sender = asyncio.create_task(connection.send_orders())
        try:
            await self._receive_reports(connection)
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sender
            self._detach(connection)
        return socket

    async def _receive_hello(self, socket: web.WebSocketResponse) -> Hello | None:
        """The first readable frame must be a hello that is let in."""
        async with asyncio.timeout(HELLO_SECONDS):
            async for message in socket:
                hello = self._decode(message.data) if message.type is WSMsgType.TEXT else None
                if not isinstance(hello, Hello):
                    continue
                refusal = self._admit(hello)
                if not refusal:
                    return hello
                _log.warning("worker %d refused: %s", hello.worker, refusal)
                await socket.close(code=CLOSE_REFUSED, message=refusal.encode()[:120])
                return None
        return None

    async def _attach(self, socket: web.WebSocketResponse, hello: Hello) -> _Connection:
        connection = _Connection(socket, hello)
        link = self._links.get(hello.worker)
        previous = link.connection if link is not None else None
        if link is None or link.hello.incarnation != hello.incarnation:
            # Another incarnation holds nothing of what the last one reported.
            link = self._links[hello.worker] = _Link(hello, self.awake.seconds())
        link.hello = hello
        link.heard_at = self.awake.seconds()
        link.connection = connection
        if previous is not None:
            await previous.socket.close(code=CLOSE_REPLACED, message=b"the worker connected again")
        if hello.worker in self._orders:
            connection.want(self._orders[hello.worker])
        self._on_change()
        return connection

    async def _receive_reports(self, connection: _Connection) -> None:
        async for message in connection.socket:
            link = self._links[connection.hello.worker]
            if link.connection is not connection:
                return
            link.heard_at = self.awake.seconds()
            if message.type is not WSMsgType.TEXT:
                continue
            report = self._decode(message.data)
            if isinstance(report, AgentReport) and report.worker == connection.hello.worker:
                link.report = report
                self._on_change()

    def _detach(self, connection: _Connection) -> None:
        link = self._links[connection.hello.worker]
        if link.connection is connection:
            link.connection = None
            self._on_change()

    def _decode(self, text: Any) -> Any:
        try:
            return decode_frame(text)
        except (ValueError, TypeError, RecursionError) as error:
            self.bad_frames += 1
            _log.warning("unreadable frame skipped: %s", error)
            return None


_KINDS: dict[str, type[Hello] | type[AgentReport] | type[WorkerOrder]] = {
    "hello": Hello,
    "report": AgentReport,
    "order": WorkerOrder,
}


def encode_frame(kind: str, message: Hello | AgentReport | WorkerOrder) -> str:
    """One text frame."""
    return json.dumps({"kind": kind, **codec.to_plain(message)}, separators=(",", ":"))


def decode_frame(text: str) -> Hello | AgentReport | WorkerOrder:
    """The message of a frame; DecodeError for anything that is none."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise codec.DecodeError(f"not JSON: {error}") from None
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise codec.DecodeError(f"unknown kind {kind!r}")
    return codec.from_plain(_KINDS[kind], data)
