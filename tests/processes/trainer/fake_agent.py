"""An agent for tests: a socket server that speaks the wire protocol, and rank processes that run a script under it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lastwords.protocol import areas, codec, control, snapshots, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.snapshots import SlotRecord, SnapshotPlan

BOOTSTRAP = """
import os, sys, traceback
from lastwords.trainer.session import Session
from lastwords.protocol.messages import ExitReport
rank = int(os.environ["RANK"])
session = Session.connect(os.environ["LASTWORDS_VOLUME"], rank, int(os.environ["LASTWORDS_ATTEMPT"]), rank == 0)
host, _, port = session.wait_welcome(60).store_address.rpartition(":")
os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
report, code = None, 0
sys.argv = sys.argv[1:]
try:
    exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
except BaseException as error:
    traceback.print_exc()
    report, code = ExitReport(exception=type(error).__qualname__, message=str(error)), 1
session.script_ended(report)
sys.stdout.flush(); sys.stderr.flush()
os._exit(code)
"""

BEGINNING = wire.RestoreOrder(source=RestoreSource.BEGINNING)


class FakeAgent:
    """Serves one worker's memory volume; everything that ranks say is in `messages`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.messages: list[tuple[int, Any]] = []
        self.changed = threading.Condition()
        self.connections: dict[int, socket.socket] = {}
        self.restore: dict[int, wire.RestoreOrder] = {}
        self.plan = SnapshotPlan(number=1, every_steps=1, persist_every=0, from_step=1)
        self.slots = 2
        self.world = 1
        self.attempt = 1
        self.store_address = ""
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.may_exit = True
        self._closing = False
        self.listen()

    def listen(self) -> None:
        path = self.folder / volume.AGENT_SOCKET
        path.unlink(missing_ok=True)
        self._closing = False
        self.server = socket.socket(socket.AF_UNIX)
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        self.server.bind(f"/proc/self/fd/{handle}/{volume.AGENT_SOCKET}")
        os.close(handle)
        self.server.listen()
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def start(
        self, script: pathlib.Path, *arguments: str, world: int = 1, attempt: int = 1, **environment: str
    ) -> None:
        """Start all ranks of an attempt."""
        self.world, self.attempt, self.store_address = world, attempt, ""
        self.messages.clear()
        for rank in range(world):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LASTWORDS_VOLUME": str(self.folder),
                "LASTWORDS_ATTEMPT": str(attempt),
                "LASTWORDS_WORKERS": "1",
                "LASTWORDS_PROCESSES_PER_WORKER": str(world),
                "OMP_NUM_THREADS": "1",
                **environment,
            }
            command = [sys.executable, "-c", BOOTSTRAP, str(script), *arguments]
            log = (self.folder / f"log-{attempt}-{rank}.txt").open("w")
            self.processes[rank] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)
            log.close()

    def log(self, rank: int = 0, attempt: int | None = None) -> str:
        return (self.folder / f"log-{attempt or self.attempt}-{rank}.txt").read_text()

    def send(self, rank: int, message: Any) -> None:
        self.connections[rank].sendall(wire.encode(message))

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.disconnect()

    def disconnect(self) -> None:
        """As if the agent died."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def wait_exit(self, rank: int = 0, seconds: float = 60) -> int:
        return self.processes[rank].wait(seconds)

    def wait_for(self, kind: type, where: Callable[[Any], bool] = lambda _: True, rank: int | None = None,
                 seconds: float = 60) -> Any:  # fmt: skip
        """The first message that fits; an error with the ranks' output when none comes."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while True:
                for sender, message in self.messages:
                    if isinstance(message, kind) and where(message) and rank in (None, sender):
                        return message
                left = deadline - time.monotonic()
                if left <= 0:
                    logs = "\n".join(self.log(rank_) for rank_ in range(self.world))
                    raise AssertionError(f"no {kind.__name__}; messages {self.messages[-10:]}\n{logs}")
                self.changed.wait(left)

    def all_of(self, kind: type, rank: int | None = None) -> list[Any]:
        with self.changed:
            return [m for sender, m in self.messages if isinstance(m, kind) and rank in (None, sender)]

    # -- the volume -------------------------------------------------------------------------------

    def word(self, word: Word, rank: int = 0) -> int:
        return control.get(memoryview((self.folder / volume.control(rank)).read_bytes()), word)

    def slot(self, index: int, rank: int = 0) -> SlotRecord | None:
        """The commit record, if the part's bytes are what it says."""
        path = self.folder / volume.part_commit(index, rank)
        body = areas.read(memoryview(path.read_bytes())) if path.exists() else None
        if not body:
            return None
        record = codec.loads(SlotRecord, body)
        data = (self.folder / volume.part(index, rank)).read_bytes()
        return record if snapshots.block_checksums(data) == record.blocks else None

    def parts(self, step: int, attempt: int | None = None) -> dict[int, int]:
        """rank -> slot of the READY parts of a step."""
        found = {}
        for rank in range(self.world):
            for index in range(self.slots):
                record = self.slot(index, rank)
                if record and record.step == step and record.attempt == (attempt or self.attempt):
                    found[rank] = index
        return found

    def restore_order(self, step: int, rank: int, attempt: int | None = None) -> wire.RestoreOrder:
        """From memory: all parts of the step, and the record that lies in the rank's slot."""
        files = []
        parts = self.parts(step, attempt)
        assert parts, f"no part of step {step}"
        for part_rank, index in sorted(parts.items()):
            record = self.slot(index, part_rank)
            assert record is not None
            path = self.folder / volume.part(index, part_rank)
            files.append(wire.RestoreFile(path=str(path), blocks=record.blocks, nbytes=record.file_bytes))
        own = parts.get(rank, min(parts.values()))
        body = areas.read(memoryview((self.folder / volume.part_rank_record(own, rank)).read_bytes()))
        assert body is not None
        kept = self.folder / f"restore-record-{rank}"
        kept.write_bytes(body)
        return wire.RestoreOrder(
            source=RestoreSource.MEMORY, step=step, attempt=attempt or self.attempt, files=tuple(files),
            chunks_path=str(self.folder / volume.LAYOUT),
            record=wire.RestoreFile(path=str(kept), blocks=snapshots.block_checksums(body), nbytes=len(body)),
        )  # fmt: skip

    # -- the server -------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank = -1
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                message = wire.decode(line)
                if isinstance(message, wire.RankHello):
                    rank = message.rank
                    self.connections[rank] = connection
                self._react(rank, message)
                with self.changed:
                    self.messages.append((rank, message))
                    self.changed.notify_all()

    def _react(self, rank: int, message: Any) -> None:
        if isinstance(message, wire.RankHello):
            if message.store_address:
                self.store_address = message.store_address
            if message.resumed:
                return
            hellos = {sender for sender, m in self.messages if isinstance(m, wire.RankHello)} | {rank}
            if self.store_address and len(hellos) == self.world:
                for other in hellos:
                    order = self.restore.get(other, BEGINNING)
                    welcome = wire.Welcome(
                        attempt=self.attempt, store_address=self.store_address, restore=order, plan=self.plan,
                        slots=self.slots,
                    )  # fmt: skip
                    self.send(other, welcome)
        elif isinstance(message, wire.ScriptEnded) and self.may_exit:
            self.send(rank, wire.MayExit())


@contextlib.contextmanager
def agent(folder: pathlib.Path) -> Iterator[FakeAgent]:
    """A fake agent that leaves nothing behind."""
    fake = FakeAgent(folder)
    try:
        yield fake
    finally:
        fake.stop()


def script(path: pathlib.Path, text: str) -> pathlib.Path:
    """Write a script."""
    path.write_text(textwrap.dedent(text))
    return path
