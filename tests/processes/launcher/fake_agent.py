"""A small agent over the real socket, and a launcher process to speak with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from lastwords.launcher import leftovers
from lastwords.protocol import environment, volume, wire
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.snapshots import SnapshotPlan

T = TypeVar("T")
DEADLINE_SECONDS = 60.0


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """Wait until `condition` gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.002)


@dataclasses.dataclass(eq=False)
class Peer:
    """One connection: a launcher or a rank."""

    connection: socket.socket
    messages: list[Any] = dataclasses.field(default_factory=list)
    closed_at: float | None = None

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(wire.encode(message))

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in list(self.messages) if isinstance(message, kind)]


class FakeAgent:
    """Welcomes ranks once rank 0 has named its store, and lets ended scripts exit."""

    def __init__(self, folder: pathlib.Path, *, may_exit: bool = True) -> None:
        self.peers: list[Peer] = []
        self.may_exit = may_exit
        self._lock = threading.Lock()
        path = folder / volume.AGENT_SOCKET
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Die: all connections end, the socket file stays."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    @property
    def launcher(self) -> Peer:
        """The launcher's newest connection."""
        return until(lambda: [p for p in list(self.peers) if p.of(wire.LauncherHello)], "a launcher says hello")[-1]

    def rank(self, rank: int, attempt: int) -> Peer:
        """The connection of a rank."""
        return until(lambda: self._rank(rank, attempt), f"rank {rank} of attempt {attempt} says hello")

    def processes(self, wanted: Callable[[wire.Processes], bool], what: str) -> wire.Processes:
        """The newest report of the launcher, once it is as wanted."""

        def look() -> wire.Processes | None:
            reports = self.launcher.of(wire.Processes)
            return reports[-1] if reports and wanted(reports[-1]) else None

        return until(look, what)

    def running(self, attempt: int, count: int) -> dict[int, int]:
        """Process id of each rank, once all have said hello."""
        for rank in range(count):
            self.rank(rank, attempt)
        report = self.processes(
            lambda r: r.attempt == attempt and len(r.processes) == count and all(p.alive for p in r.processes),
            f"{count} ranks of attempt {attempt} run",
        )
        return {process.rank: process.pid for process in report.processes}

    def dead(self, rank: int, attempt: int) -> wire.RankProcess:
        """The report of a rank's death."""
        report = self.processes(
            lambda r: r.attempt == attempt and any(p.rank == rank and not p.alive for p in r.processes),
            f"rank {rank} of attempt {attempt} is dead",
        )
        return next(p for p in report.processes if p.rank == rank)

    def ended(self, rank: int, attempt: int) -> wire.ScriptEnded:
        """What the runner said when the script ended."""
        return until(lambda: self.rank(rank, attempt).of(wire.ScriptEnded), f"rank {rank}'s script ended")[0]

    def _rank(self, rank: int, attempt: int) -> Peer | None:
        for peer in reversed(list(self.peers)):
            if any(hello.rank == rank and hello.attempt == attempt for hello in peer.of(wire.RankHello)):
                return peer
        return None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            peer = Peer(connection)
            self.peers.append(peer)
            threading.Thread(target=self._read, args=(peer,), daemon=True).start()

    def _read(self, peer: Peer) -> None:
        with contextlib.suppress(OSError), peer.connection.makefile("rb") as file:
            for line in file:
                message = wire.decode(line)
                peer.messages.append(message)
                self._answer(peer, message)
        peer.closed_at = time.monotonic()

    def _answer(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.RankHello):
            self._welcome(message.attempt)
        elif isinstance(message, wire.ScriptEnded) and self.may_exit:
            peer.send(wire.MayExit())

    def _welcome(self, attempt: int) -> None:
        with self._lock:
            hellos = [
                (peer, hello)
                for peer in self.peers
                for hello in peer.of(wire.RankHello)
                if hello.attempt == attempt and peer.closed_at is None
            ]
            addresses = [hello.store_address for _, hello in hellos if hello.store_address]
            for peer, _ in hellos if addresses else []:
                peer.send(
                    wire.Welcome(
                        attempt=attempt,
                        store_address=addresses[-1],
                        restore=wire.RestoreOrder(source=RestoreSource.BEGINNING),
                        plan=SnapshotPlan(number=1, from_step=1, every_steps=10**9),
                        slots=2,
                    )
                )


class Launched:
    """
    A launcher process, its volume and logs. `output` is what it wrote to its console so far.

    `patch` is code that runs in it first, for example to shorten its waits.
    """

    def __init__(
        self, folder: pathlib.Path, command: list[str], *, procs: int, variables: Mapping[str, str], patch: str = ""
    ) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        self.logs = folder / "logs"
        self.volume.mkdir(exist_ok=True)
        self.uid_file = folder / "uid"
        if not self.uid_file.exists():
            self.uid_file.write_text(uuid.uuid4().hex)
        self.uid = self.uid_file.read_text()
        self.console = folder / "console"
        start = ["-c", f"{patch}\nimport sys\nfrom lastwords.launcher.__main__ import main\nsys.exit(main())"]
        line = [sys.executable, *(start if patch else ["-m", "lastwords.launcher"])]
        line += ["--volume", str(self.volume), "--worker", "0"]
        line += ["--uid", self.uid, "--logs", str(self.logs), "--", *command]
        values = {**os.environ, environment.PROCESSES_PER_WORKER: str(procs), **variables}
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                line, cwd=folder, env=values, stdout=console, stderr=console, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.console.read_text()

    def log(self, rank: int, attempt: int) -> str:
        return (self.logs / f"rank-{rank}-a{attempt}.log").read_text()

    def left(self) -> list[int]:
        """Processes that this worker's launchers started and that still live."""
        return leftovers.find([f"{environment.WORKER_UID}={self.uid}"])

    def zygote(self) -> int:
        """The process that the others were forked from, 0 when there is none."""
        return min(self._runners("--zygote"), key=lambda pid: _stat(pid, 21), default=0)

    def waiting(self) -> list[int]:
        """Standbys, and ranks that were forked or started like them."""
        return [pid for pid in self._runners("--zygote", "--standby") if pid != self.zygote()]

    def _runners(self, *options: str) -> list[int]:
        # Not the short-lived ones between zygote and launcher.
        own = [pid for pid in self.left() if _stat(pid, 3) == self.process.pid]
        return [pid for pid in own if set(_words(pid)) & set(options)]

    def kill(self) -> None:
        """SIGKILL to the launcher alone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _stat(pid: int, field: int) -> int:
    """Field of /proc/<pid>/stat, numbered from 0; of a process that is gone the largest number."""
    with contextlib.suppress(OSError):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field - 2])
    return sys.maxsize


@contextlib.contextmanager
def worker(
    folder: pathlib.Path, script: str, *arguments: str, procs: int = 1, **variables: str
) -> Iterator[tuple[Launched, FakeAgent]]:
    """A launcher for `script` with an agent; afterwards nothing of it is left."""
    (folder / "script.py").write_text(script)
    launched = Launched(folder, [sys.executable, "script.py", *arguments], procs=procs, variables=variables)
    agent = FakeAgent(launched.volume)
    try:
        yield launched, agent
    finally:
        end(launched, agent)


def end(launched: Launched, agent: FakeAgent) -> None:
    """End as ordered, or by force."""
    deadline = time.monotonic() + 20.0
    while launched.process.poll() is None and time.monotonic() < deadline:
        launched.process.send_signal(signal.SIGTERM)  # the second one ends it; two at once may arrive as one
        with contextlib.suppress(subprocess.TimeoutExpired):
            launched.process.wait(0.2)
    if launched.process.poll() is None:
        launched.kill()
    agent.close()
    until(lambda: not launched.left(), "no process is left", 10.0)


def order(attempt: int, count: int, **variables: str) -> wire.RunRanks:
    """Run `count` ranks."""
    return wire.RunRanks(attempt=attempt, ranks=tuple(range(count)), environment=dict(variables))
