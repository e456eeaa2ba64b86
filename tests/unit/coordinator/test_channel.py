"""The workers' channel over a real unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from lastwords.protocol.messages import AgentReport, Hello, RunState, WorkerOrder
from lastwords.protocol.pieces import Topology
from lastwords_operator.coordinator import channel as channels

TOPOLOGY = Topology(workers=2, processes_per_worker=2)


def order(number: int, attempt: int = 1) -> WorkerOrder:
    return WorkerOrder(epoch=1, number=number, attempt=attempt, run=RunState.RUNNING, topology=TOPOLOGY)


def report(worker: int = 0, attempt: int = 0) -> AgentReport:
    return AgentReport(worker=worker, incarnation="a", attempt=attempt)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come about"
        await asyncio.sleep(0.005)


class Agent:
    """The client side, as an agent would be."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))

    async def connect(self, worker: int = 0, incarnation: str = "a", token: str = "secret") -> None:
        self.socket = await self.session.ws_connect(f"http://coordinator{channels.PATH}")
        hello = Hello(worker=worker, incarnation=incarnation, agent_run="r", token=token)
        await self.socket.send_str(channels.encode_frame("hello", hello))

    async def send(self, message: AgentReport) -> None:
        await self.socket.send_str(channels.encode_frame("report", message))

    async def order(self, seconds: float = 5.0) -> WorkerOrder:
        message = await self.socket.receive(timeout=seconds)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        decoded = channels.decode_frame(message.data)
        assert isinstance(decoded, WorkerOrder)
        return decoded


class Side:
    """A channel that listens, and what happened on it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.changes = 0
        self.channel = channels.Channel(admit=self.admit, on_change=self.changed)

    def admit(self, hello: Hello) -> str:
        return "" if hello.token == "secret" else "wrong token"

    def changed(self) -> None:
        self.changes += 1

    def agent(self) -> Agent:
        return Agent(self.path)


@contextlib.asynccontextmanager
async def listening(path: pathlib.Path) -> AsyncIterator[Side]:
    side = Side(path / "c.sock")
    await side.channel.start(side.path)
    try:
        yield side
    finally:
        await side.channel.stop()


@contextlib.asynccontextmanager
async def connected(side: Side, worker: int = 0, incarnation: str = "a") -> AsyncIterator[Agent]:
    agent = side.agent()
    await agent.connect(worker, incarnation)
    try:
        yield agent
    finally:
        await agent.session.close()


def test_keeps_the_newest_report_and_says_that_it_changed(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side, connected(side) as agent:
            for attempt in (1, 2, 3):
                await agent.send(report(attempt=attempt))
            await until(lambda: (row := side.channel.heard().get(0)) is not None and row.report == report(attempt=3))
            assert side.changes >= 4
            assert side.channel.heard()[0].connected

    asyncio.run(scenario())


def test_an_order_is_sent_once_and_again_on_a_new_connection(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side:
            async with connected(side) as agent:
                side.channel.push({0: order(1)})
                assert await agent.order() == order(1)
                side.channel.push({0: order(1)})
                side.channel.push({0: order(2)})
                assert await agent.order() == order(2)
            await until(lambda: not side.channel.heard()[0].connected)
            async with connected(side) as agent:
                assert await agent.order() == order(2)

    asyncio.run(scenario())


def test_orders_given_before_a_worker_connects_reach_it(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side:
            side.channel.push({1: order(7)})
            async with connected(side, worker=1) as agent:
                assert await agent.order() == order(7)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "{",
        "[]",
        "null",
        '"report"',
        '{"kind": "report"}',
        '{"kind": "report", "worker": "zero", "incarnation": "a"}',
        '{"kind": "nothing we know"}',
        '{"kind": "report", "worker": 0, "incarnation": "a", "ranks": [{"rank": 0, "state": "dancing"}]}',
        "[" * 100_000,
    ],
)
def test_an_unreadable_frame_never_ends_the_connection(tmp_path: pathlib.Path, frame: str) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side, connected(side) as agent:
            await agent.socket.send_str(frame)
            await agent.send(report(attempt=5))
            await until(lambda: (row := side.channel.heard().get(0)) is not None and row.report is not None)
            assert side.channel.bad_frames == 1
            side.channel.push({0: order(1)})
            assert await agent.order() == order(1)

    asyncio.run(scenario())


def test_unknown_fields_of_a_newer_agent_are_ignored() -> None:
    frame = json.loads(channels.encode_frame("report", report(attempt=4))) | {"something_new": [1]}
    assert channels.decode_frame(json.dumps(frame)) == report(attempt=4)


def test_a_wrong_token_is_refused(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side:
            agent = side.agent()
            await agent.connect(token="guess")
            message = await agent.socket.receive(timeout=5)
            assert message.type is aiohttp.WSMsgType.CLOSE
            assert message.data == channels.CLOSE_REFUSED
            assert side.channel.heard() == {}
            await agent.session.close()

    asyncio.run(scenario())


def test_the_newest_connection_of_a_worker_counts(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side, connected(side) as old, connected(side) as new:
            message = await old.socket.receive(timeout=5)
            assert message.data == channels.CLOSE_REPLACED
            await new.send(report(attempt=9))
            await until(lambda: (row := side.channel.heard()[0]).connected and row.report == report(attempt=9))

    asyncio.run(scenario())


def test_what_another_incarnation_reported_is_forgotten(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as side:
            async with connected(side) as agent:
                await agent.send(report(attempt=1))
                await until(lambda: (row := side.channel.heard().get(0)) is not None and row.report is not None)
            async with connected(side, incarnation="b"):
                await until(lambda: side.channel.heard()[0].incarnation == "b")
                assert side.channel.heard()[0].report is None

    asyncio.run(scenario())


def test_a_left_over_socket_file_is_replaced(tmp_path: pathlib.Path) -> None:
    async def scenario() -> None:
        dead = channels.Channel(admit=lambda hello: "", on_change=lambda: None)
        await dead.start(tmp_path / "c.sock")
        assert dead._runner is not None
        for site in list(dead._runner.sites):
            site._server.close()  # type: ignore[attr-defined]  # closed, but its file stays as after SIGKILL
        assert (tmp_path / "c.sock").exists()
        async with listening(tmp_path) as side, connected(side):
            await until(lambda: 0 in side.channel.heard())

    asyncio.run(scenario())


def test_a_stall_of_our_own_is_nobodys_silence() -> None:
    now = [100.0]
    clock = channels.AwakeClock(lambda: now[0], period_seconds=0.25)
    for _ in range(4):
        now[0] += 0.25
        clock.sweep()
    assert clock.seconds() == pytest.approx(1.0)
    now[0] += 60.0  # the machine was suspended
    assert clock.seconds() == pytest.approx(1.5)
    clock.sweep()
    assert clock.seconds() == pytest.approx(1.5)
    assert clock.late_seconds == pytest.approx(59.5)
