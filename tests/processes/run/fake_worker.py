"""
A worker that only pretends: `fake_worker.py lastwords.agent ...` plays an agent whose ranks count steps.

It keeps to the protocol, so that the coordinator can be tested in a second. Its ranks need no process: they are at the
step that the clock says, end at TOTAL, and "save" to a file that stands for the storage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import signal
import sys
import time
import uuid

import aiohttp

from lastwords.protocol import codec
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import (
    AgentReport,
    CheckpointInfo,
    Hello,
    RankReport,
    RankState,
    RestoreSource,
    RunState,
    StorageReport,
    WorkerOrder,
)
from lastwords_operator.coordinator import channel

TOTAL = int(os.environ.get("FAKE_STEPS", "60"))
STEPS_PER_SECOND = 50.0


class FakeAgent:
    """State that a new agent process would find again is in the volume."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.agent_run = uuid.uuid4().hex
        self.order: WorkerOrder | None = None
        self.state = pathlib.Path(options.volume) / "fake.json"
        self.saved = pathlib.Path(options.storage) / "fake-checkpoints.json"

    def run_state(self) -> dict[str, float]:
        try:
            return dict(json.loads(self.state.read_text()))
        except (OSError, ValueError):
            return {}

    def take(self, order: WorkerOrder) -> None:
        self.order = order
        running = self.run_state()
        if order.run is RunState.RUNNING and running.get("attempt") != order.attempt:
            step = order.restore.step if order.restore and order.restore.source is not RestoreSource.BEGINNING else 0
            row = {"attempt": order.attempt, "from": step, "began": time.time()}
            self.state.write_text(json.dumps(row))
        elif order.run is not RunState.RUNNING:
            self.state.unlink(missing_ok=True)

    def step(self) -> tuple[int, bool]:
        """Where all ranks are, and whether that is their end."""
        running = self.run_state()
        last = TOTAL
        if self.order is not None and self.order.plan is not None and self.order.plan.stop_after is not None:
            last = min(TOTAL, self.order.plan.stop_after)
        step = int(running["from"] + (time.time() - running["began"]) * STEPS_PER_SECOND)
        return min(step, last), step >= last

    def checkpoints(self) -> list[list[int]]:
        return json.loads(self.saved.read_text()) if self.saved.exists() else []

    def report(self) -> AgentReport:
        running, order = self.run_state(), self.order
        ranks: tuple[RankReport, ...] = ()
        if running:
            step, done = self.step()
            if done and self.options.worker == 0 and [step, int(running["attempt"])] not in self.checkpoints():
                new = self.saved.with_suffix(".new")
                new.write_text(json.dumps([*self.checkpoints(), [step, int(running["attempt"])]]))
                new.rename(self.saved)  # the other worker reads it at any moment
            first = self.options.worker * self.options.procs
            state = RankState.FINISHED if done else RankState.RUNNING
            ranks = tuple(
                RankReport(rank=rank, state=state, pid=os.getpid(), step=step, step_seconds=0.02, loss=1.0 / (1 + step))
                for rank in range(first, first + self.options.procs)
            )
        infos = [CheckpointInfo(id=CheckpointId(step=step, attempt=attempt)) for step, attempt in self.checkpoints()]
        return AgentReport(
            worker=self.options.worker,
            incarnation=self.options.incarnation,
            agent_run=self.agent_run,
            epoch_seen=order.epoch if order else 0,
            order_seen=order.number if order else 0,
            attempt=int(running.get("attempt", 0)),
            run=RunState.RUNNING if running else RunState.STOPPED,
            launcher=True,
            fetch_address="127.0.0.1:1",
            store_address="127.0.0.1:2" if running and self.options.worker == 0 else "",
            ranks=ranks,
            storage=StorageReport(loaded=True, checkpoints=tuple(infos)),
        )

    async def live(self) -> None:
        path = self.options.coordinator.removeprefix("unix:")
        while True:
            try:
                async with (
                    aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
                    session.ws_connect(f"http://coordinator{channel.PATH}") as socket,
                ):
                    if await self.serve(socket):
                        return
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)

    async def serve(self, socket: aiohttp.ClientWebSocketResponse) -> bool:
        """One connection; True when this worker is to end."""
        options = self.options
        token = pathlib.Path(options.token_file).read_text().strip()
        hello = Hello(worker=options.worker, incarnation=options.incarnation, agent_run=self.agent_run, token=token)
        await socket.send_str(channel.encode_frame("hello", hello))
        talking = asyncio.create_task(self.talk(socket))
        try:
            async for message in socket:
                order = channel.decode_frame(message.data)
                assert isinstance(order, WorkerOrder)
                self.take(order)
                if order.run is RunState.ENDED:
                    self.end_launcher()
                    return True
            return False
        finally:
            talking.cancel()

    async def talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        sent = None
        while True:
            text = codec.dumps(report := self.report())
            if text != sent:
                await socket.send_str(channel.encode_frame("report", report))
                sent = text
            await asyncio.sleep(0.02)

    def end_launcher(self) -> None:
        try:
            os.kill(int((pathlib.Path(self.options.volume) / "launcher").read_text()), signal.SIGTERM)
        except (OSError, ValueError):
            pass


def main() -> None:
    kind = sys.argv[1]
    parser = argparse.ArgumentParser()
    for name in ("volume", "incarnation", "coordinator", "storage", "token-file"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--procs", type=int)
    options, _ = parser.parse_known_args(sys.argv[2:])
    if kind == "lastwords.launcher":
        print("[rank 0] hello from a rank", flush=True)
        (pathlib.Path(options.volume) / "launcher").write_text(str(os.getpid()))
        signal.pause()
    asyncio.run(FakeAgent(options).live())


if __name__ == "__main__":
    main()
