"""A coordinator, a launcher and ranks that speak the real protocols, around a real agent process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from lastwords.protocol import areas, chunks, codec, control, pieces, snapshots, tensorfile, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.messages import AgentReport, Hello, RestorePlan, RestoreSource, RunState, WorkerOrder
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.protocol.snapshots import RecordHead, SlotRecord

DEADLINE_SECONDS = 30.0
UID = "uid-1"


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} seconds: {what}")
        await asyncio.sleep(0.005)
    return value


# --- coordinator ------------------------------------------------------------------------------------


class Coordinator:
    """Keeps the newest report of each worker and sends whole orders."""

    def __init__(self, socket: pathlib.Path) -> None:
        self.socket = socket
        self.hellos: list[Hello] = []
        self.reports: dict[int, AgentReport] = {}
        self.count = 0
        self.sockets: dict[int, web.WebSocketResponse] = {}
        self.orders: dict[int, WorkerOrder] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", self._serve)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def stop(self) -> None:
        assert self._runner is not None
        for socket in list(self.sockets.values()):
            await socket.close()
        await self._runner.cleanup()
        self.socket.unlink(missing_ok=True)

    async def order(self, worker: int, order: WorkerOrder) -> None:
        """Make it the worker's order, now and for later connections."""
        self.orders[worker] = order
        if worker in self.sockets:
            await self.send(worker, json.dumps({"kind": "order", **codec.to_plain(order)}))

    async def send(self, worker: int, text: str) -> None:
        await self.sockets[worker].send_str(text)

    async def wait(
        self, worker: int, condition: Callable[[AgentReport], Any], what: str, seconds: float = DEADLINE_SECONDS
    ) -> AgentReport:
        """The first report of which `condition` is true."""
        await until(lambda: worker in self.reports and condition(self.reports[worker]), what, seconds)
        return self.reports[worker]

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=1 << 26)
        await socket.prepare(request)
        worker = -1
        async for message in socket:
            data = json.loads(message.data)
            if data.pop("kind") == "hello":
                hello = codec.from_plain(Hello, data)
                worker = hello.worker
                self.hellos.append(hello)
                self.sockets[worker] = socket
                if worker in self.orders:
                    await self.order(worker, self.orders[worker])
            else:
                self.reports[worker] = codec.from_plain(AgentReport, data)
                self.count += 1
        if self.sockets.get(worker) is socket:
            del self.sockets[worker]
        return socket


# --- launcher and ranks -----------------------------------------------------------------------------


class Peer:
    """One end of a connection to the agent's socket."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.got: list[Any] = []
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def connect(self, hello: Any) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            path = f"/proc/self/fd/{descriptor}/{volume.AGENT_SOCKET}"
            deadline = time.monotonic() + DEADLINE_SECONDS
            while True:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(path, limit=wire.MAX_LINE_BYTES)
                    break
                except OSError:
                    assert time.monotonic() < deadline, "the agent does not listen"
                    await asyncio.sleep(0.01)
        finally:
            os.close(descriptor)
        self.send(hello)
        self._task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = wire.decode(line)
            self.got.append(message)
            self.on_message(message)
        self.got.append(None)

    def on_message(self, message: Any) -> None:
        """For subclasses."""

    def send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(wire.encode(message))

    def raw(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._task is not None:
            self._task.cancel()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.got if isinstance(message, kind)]

    async def wait(self, kind: type, count: int = 1) -> Any:
        """The `count`-th message of this kind."""
        await until(lambda: len(self.of(kind)) >= count, f"{count} of {kind.__name__}")
        return self.of(kind)[count - 1]


class Launcher(Peer):
    """Starts nothing: says that it did."""

    def __init__(self, folder: pathlib.Path, pid: int = 4242) -> None:
        super().__init__(folder)
        self.pid = pid
        self.attempt = 0
        self.alive: dict[int, wire.RankProcess] = {}

    async def begin(self, error: str = "") -> None:
        await self.connect(wire.LauncherHello(pid=self.pid, error=error))
        self.tell()

    def tell(self) -> None:
        self.send(wire.Processes(attempt=self.attempt, processes=tuple(self.alive.values())))

    def on_message(self, message: Any) -> None:
        if isinstance(message, wire.RunRanks) and message.attempt > self.attempt:
            self.attempt = message.attempt
            self.alive = {rank: wire.RankProcess(rank=rank, pid=os.getpid(), alive=True) for rank in message.ranks}
            self.tell()
        elif isinstance(message, wire.StopRanks) and message.attempt >= self.attempt:
            self.alive = {r: dataclasses.replace(p, alive=False, signal=9) for r, p in self.alive.items()}
            self.tell()
        elif isinstance(message, wire.EndLauncher):
            self.close()

    def died(self, rank: int, *, code: int | None = None, signal: int | None = 9, log_tail: str = "") -> None:
        self.alive[rank] = dataclasses.replace(
            self.alive[rank], alive=False, code=code, signal=None if code is not None else signal, log_tail=log_tail
        )
        self.tell()


class FakeRank(Peer):
    """A rank with its side of the volume: control block, parts, records."""

    def __init__(self, state: Volume, rank: int, attempt: int) -> None:
        super().__init__(state.folder)
        self.state, self.rank, self.attempt = state, rank, attempt
        self.hold = 0
        self.block = state.block(rank)
        control.initialise(self.block, rank=rank, attempt=attempt, pid=os.getpid())
        control.put(self.block, Word.BOUNDARY_NS, time.monotonic_ns())

    async def begin(self, *, resumed: bool = False) -> None:
        address = f"127.0.0.1:{40000 + self.attempt}" if self.rank == 0 else ""
        await self.connect(
            wire.RankHello(
                rank=self.rank, attempt=self.attempt, pid=os.getpid(), store_address=address, resumed=resumed
            )
        )

    def on_message(self, message: Any) -> None:
        if isinstance(message, wire.Hold):
            self.hold = message.hold
            step = max(control.get(self.block, Word.STEP) - 1, 0)
            self.send(wire.HoldState(hold=message.hold, step=step, odd=False, at_gate=True))

    def foretell(self, step: int) -> None:
        self.state.write_record(self.rank, step, self.attempt, provisional=True)
        self.send(wire.RecordWritten(step=step))

    def boundary(self, step: int, *, foretold: bool = False) -> None:
        self.state.write_record(self.rank, step, self.attempt)
        control.put(self.block, Word.STEP, step + 1)
        control.put(self.block, Word.BOUNDARY_NS, time.monotonic_ns())
        self.send(wire.Boundary(step=step, foretold=foretold))

    def snapshot(
        self, step: int, slot: int, *, persist: bool = True, kind: str = "periodic", finite: bool = True
    ) -> None:
        self.state.write_part(slot, self.rank, step, self.attempt, finite=finite)
        self.send(wire.SnapshotReady(step=step, slot=slot, persist=persist, persist_kind=kind))


# --- volume -----------------------------------------------------------------------------------------


def make_table(topology: Topology, nbytes: int = 40_000) -> PieceTable:
    """DDP: every rank holds everything."""
    layout = [chunks.whole(f"model.w{i}", "float32", (nbytes // 40,)) for i in range(9)]
    layout.append(chunks.whole("optimizer.step", "int64", ()))
    return pieces.build_table(dict.fromkeys(range(topology.world), layout), topology, 1)


def chunk_bytes(chunk: chunks.Chunk, step: int, attempt: int) -> bytes:
    """The content of a chunk at a step: different for each."""
    seed = f"{chunk.key}/{step}/{attempt}/".encode()
    return (seed * (chunk.nbytes // len(seed) + 1))[: chunk.nbytes]


def record_bytes(rank: int, step: int, attempt: int, *, provisional: bool = False, exact: bool = True) -> bytes:
    head = RecordHead(step=step, attempt=attempt, rank=rank, generation=1, provisional=provisional, exact=exact)
    metadata = {"head": codec.dumps(head).decode(), "own": json.dumps([rank, step]), "shared": "{}"}
    header, _ = tensorfile.build_header([], metadata)
    return header


class Volume:
    """Writes what launcher and ranks would write."""

    def __init__(self, folder: pathlib.Path, table: PieceTable) -> None:
        self.folder = folder
        self.table = table
        folder.mkdir(parents=True, exist_ok=True)

    def write_layout(self) -> None:
        (self.folder / volume.LAYOUT).write_bytes(codec.dumps(self.table))

    def block(self, rank: int) -> memoryview:
        return self._map(volume.control(rank), control.BLOCK_BYTES)

    def part_bytes(self, rank: int, step: int, attempt: int) -> bytes:
        ids = pieces.part_chunks(self.table)[rank]
        header, ranges = pieces.part_layout(self.table, ids)
        data = bytearray(header.ljust(max((end for _, end in ranges.values()), default=0), b"\0"))
        for chunk_id, (begin, end) in ranges.items():
            data[begin:end] = chunk_bytes(self.table.chunks[chunk_id], step, attempt)
        return bytes(data)

    def write_part(self, slot: int, rank: int, step: int, attempt: int, *, finite: bool = True) -> None:
        data = self.part_bytes(rank, step, attempt)
        area = self._map(volume.part_commit(slot, rank), volume.COMMIT_AREA_BYTES)
        areas.invalidate(area)
        (self.folder / volume.part(slot, rank)).write_bytes(data)
        record = self._map(volume.part_rank_record(slot, rank), 64 * 1024)
        areas.commit(record, record_bytes(rank, step, attempt))
        commit = SlotRecord(
            step=step, attempt=attempt, rank=rank, generation=self.table.generation, file_bytes=len(data),
            blocks=snapshots.block_checksums(data), finite=finite,
        )  # fmt: skip
        areas.commit(area, codec.dumps(commit))

    def write_record(
        self, rank: int, step: int, attempt: int, *, provisional: bool = False, exact: bool = True
    ) -> None:
        capacity = 64 * 1024
        view = self._map(volume.records(rank), capacity * volume.RECORD_AREAS)
        index = volume.record_area_index(step, provisional=provisional)
        body = record_bytes(rank, step, attempt, provisional=provisional, exact=exact)
        areas.commit(view[index * capacity : (index + 1) * capacity], body)

    def pins(self) -> list[int]:
        path = self.folder / volume.PINS
        data = path.read_bytes() if path.exists() else b""
        return list(memoryview(data).cast("Q")) if data else []

    def _map(self, name: str, nbytes: int) -> memoryview:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size != nbytes:
                os.ftruncate(file, nbytes)
            return memoryview(mmap.mmap(file, nbytes))
        finally:
            os.close(file)


# --- the agent --------------------------------------------------------------------------------------


class World:
    """Workers of one job, each with a volume and an agent process, and their coordinator."""

    def __init__(self, folder: pathlib.Path, topology: Topology, nbytes: int = 40_000) -> None:
        self.folder = folder
        self.topology = topology
        self.table = make_table(topology, nbytes)
        self.storage = folder / "storage"
        (folder / "token").write_text("secret\n")
        self.coordinator = Coordinator(folder / "coordinator.sock")
        self.volumes = [Volume(folder / f"volume-{w}", self.table) for w in range(topology.workers)]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.launchers: dict[int, Launcher] = {}
        self.ranks: dict[int, FakeRank] = {}
        self.numbers = 0
        self.variables: dict[str, str] = {}
        self.arguments: list[str] = []

    def start_agent(self, worker: int) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "lastwords.agent", "--volume", str(self.volumes[worker].folder)]
        line += ["--worker", str(worker), "--incarnation", f"i{worker}", "--storage", str(self.storage)]
        line += ["--coordinator", f"unix:{self.coordinator.socket}", "--job-uid", UID, "--job-name", "job"]
        line += ["--namespace", "ns", "--token-file", str(self.folder / "token")]
        line += ["--workers", str(self.topology.workers), "--procs", str(self.topology.processes_per_worker)]
        with (self.folder / f"agent-{worker}.log").open("ab") as log:
            agent = subprocess.Popen(
                [*line, *self.arguments], stdout=log, stderr=log, env={**os.environ, **self.variables}
            )
        self.agents[worker] = agent
        return agent

    def kill_agent(self, worker: int) -> None:
        self.agents[worker].send_signal(signal.SIGKILL)
        self.agents[worker].wait()

    async def start(self) -> None:
        """Agents, launchers; every worker has reported."""
        await self.coordinator.start()
        for worker in range(self.topology.workers):
            self.start_agent(worker)
        for worker in range(self.topology.workers):
            self.launchers[worker] = Launcher(self.volumes[worker].folder, pid=5000 + worker)
            await self.launchers[worker].begin()
            await self.coordinator.wait(worker, lambda r: r.launcher and r.storage.loaded, "the worker is there")

    async def stop(self) -> None:
        for peer in (*self.ranks.values(), *self.launchers.values()):
            peer.close()
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        await self.coordinator.stop()

    def make_order(self, attempt: int, run: RunState = RunState.RUNNING, **values: Any) -> WorkerOrder:
        """The next order."""
        self.numbers += 1
        defaults: dict[str, Any] = {
            "epoch": 1,
            "number": self.numbers,
            "topology": self.topology,
            "lineage": tuple(LineageEntry(n, 0, n - 1) for n in range(1, attempt + 1)),
            "restore": RestorePlan(source=RestoreSource.BEGINNING) if run is RunState.RUNNING else None,
            "peers": {w: r.fetch_address for w, r in self.coordinator.reports.items()},
            "plan": snapshots.SnapshotPlan(number=1) if run is RunState.RUNNING else None,
        }
        return WorkerOrder(attempt=attempt, run=run, **{**defaults, **values})

    async def order_all(self, attempt: int, run: RunState = RunState.RUNNING, **values: Any) -> None:
        order = self.make_order(attempt, run, **values)
        for worker in range(self.topology.workers):
            await self.coordinator.order(worker, order)

    async def run_attempt(self, attempt: int, **values: Any) -> None:
        """Order it; ranks connect; all are welcomed."""
        await self.order_all(attempt, **values)
        for worker in range(self.topology.workers):
            await until(lambda w=worker: self.launchers[w].attempt == attempt, "the launcher was told to run ranks")
            for rank in self.topology.ranks_of(worker):
                self.ranks[rank] = FakeRank(self.volumes[worker], rank, attempt)
                await self.ranks[rank].begin()
        first = await self.coordinator.wait(0, lambda r: r.store_address and r.attempt == attempt, "the store is known")
        await self.order_all(attempt, store_address=first.store_address, **values)
        for rank in self.ranks.values():
            await rank.wait(wire.Welcome)


@contextlib.asynccontextmanager
async def running(
    folder: pathlib.Path, topology: Topology, prepare: Callable[[World], None] | None = None, nbytes: int = 40_000
) -> AsyncIterator[World]:
    """A world that is started, and stopped whatever happens."""
    world = World(folder, topology, nbytes)
    if prepare is not None:
        prepare(world)
    try:
        await world.start()
        yield world
    except BaseException:
        for log in sorted(folder.glob("agent-*.log")):
            print(f"--- {log.name}\n{log.read_text()}")
        raise
    finally:
        await world.stop()
