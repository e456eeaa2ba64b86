"""
A rank's session with its agent, from the runner's first line to the process's last.

The runner calls `Session.connect`, waits for the `Welcome`, runs the script, and reports how it ended. The
Checkpointer in the script finds the session with `current()` and adds what it can do: live copies and plans.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lastwords.protocol import control, environment, volume, wire
from lastwords.protocol.control import Word
from lastwords.protocol.messages import ExitReport
from lastwords.protocol.pieces import Topology
from lastwords.trainer import stacks
from lastwords.trainer.gate import Gate
from lastwords.trainer.link import Link

log = logging.getLogger("lastwords")

_AGENT_AWAY_SECONDS = 15.0
_LEAVE_SECONDS = 2.0
_LEFT = "lastwords/left"
_REPEATED = (wire.LayoutReady, wire.SnapshotReady, wire.LiveCopyDone, wire.Finished, wire.ScriptEnded)

_current: Session | None = None


def current() -> Session | None:
    """The session of this process, or None when no runner made one."""
    return _current


class Session:
    """What a rank shares with its agent: socket, control block, gate, and on rank 0 the attempt's store."""

    def __init__(self, folder: str, rank: int, attempt: int, store_host: bool, torch_store: str = "") -> None:
        self.folder = folder
        self.rank = rank
        self.attempt = attempt
        self.topology = _topology()
        self.block = _map_control(folder, rank)
        control.initialise(self.block, rank=rank, attempt=attempt, pid=os.getpid())
        control.put(self.block, Word.BOUNDARY_NS, time.monotonic_ns())
        self._torch_store = torch_store
        self._store = self._host_store() if store_host else None
        address = os.environ.get(environment.ADDRESS, "127.0.0.1")
        self.store_address = f"{address}:{self._store.port}" if self._store and not torch_store else ""
        self.gate = Gate(self.block, self.send)
        self.welcome: wire.Welcome | None = None
        self._welcomed = threading.Event()
        self._may_exit = threading.Event()
        self._greeted = False
        self._repeated: dict[str, Any] = {}
        self._notices: list[wire.RankNotice] = []
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._plans: list[wire.NewPlan] = []
        self.before_end: Callable[[], None] | None = None
        """Called when the script has ended normally, before that is said."""
        self.link = Link(folder, self._greeting, self._handle)

    @classmethod
    def connect(cls, volume: str, rank: int, attempt: int, store_host: bool, torch_store: str = "") -> Session:
        """
        Begin the session of this process: host the attempt's store if told so, begin the control block, say hello.

        `torch_store` (host:port): the process group's own store is the attempt's; the agent is told no other.
        Returns at once; the connection is made (and made again) in the background.
        """
        global _current
        session = cls(volume, rank, attempt, store_host, torch_store)
        session.link.start()
        _current = session
        return session

    def wait_welcome(self, timeout_seconds: float | None = None) -> wire.Welcome:
        """Block until the worker is prepared and the attempt's store is known. Raises TimeoutError."""
        if not self._welcomed.wait(timeout_seconds) or self.welcome is None:
            raise TimeoutError(f"no welcome from the agent within {timeout_seconds} seconds")
        return self.welcome

    def wait_may_exit(self, timeout_seconds: float) -> None:
        """Block until everything of this rank that can be kept is kept, or the agent has been away for long."""
        deadline = time.monotonic() + timeout_seconds
        while not self._may_exit.wait(0.05):
            if time.monotonic() > deadline or self.link.away_seconds() > _AGENT_AWAY_SECONDS:
                return

    def script_ended(self, exit: ExitReport | None, timeout_seconds: float = 60.0) -> bool:
        """
        Say how the script ended and wait until the agent has taken what it needs of this process.

        Returns whether it said so; False after the timeout, or when the agent has been away for long.
        """
        if exit is not None:
            self.gate.dying = True
        elif self.before_end is not None:
            self.before_end()
        self.send(wire.ScriptEnded(exit=exit))
        deadline = time.monotonic() + timeout_seconds
        while not self._may_exit.wait(0.05):
            if time.monotonic() > deadline or self.link.away_seconds() > _AGENT_AWAY_SECONDS:
                return False
        if exit is None:
            self._leave()
        return True

    def _leave(self) -> None:
        """The rank that hosts the attempt's store is the last to go: the others' scripts may still need it."""
        others = self.topology.world - 1
        if self._store is None:
            with contextlib.suppress(Exception):
                self.store_client(_LEAVE_SECONDS).add(_LEFT, 1)
        else:
            while self._store.add(_LEFT, 0) < others and self.link.away_seconds() <= _AGENT_AWAY_SECONDS:
                time.sleep(0.05)

    def close(self) -> None:
        """End the connection."""
        global _current
        self.link.close()
        if _current is self:
            _current = None

    # -- what the Checkpointer uses ---------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send to the agent; what it must know after a restart of its own is kept and repeated."""
        if isinstance(message, _REPEATED):
            name = type(message).__name__
            self._repeated.pop(name, None)
            self._repeated[name] = message
        elif isinstance(message, wire.RankNotice):
            self._notices.append(message)
        self.link.send(message)

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Handle messages of `kind` (on the link's thread: must be quick). Plans that came before are handed over."""
        self._handlers[kind] = handler
        if kind is wire.NewPlan:
            early, self._plans = self._plans, []
            for order in early:
                handler(order)

    def put(self, word: Word, value: int) -> None:
        """Write a word of the control block."""
        control.put(self.block, word, value)

    def get(self, word: Word) -> int:
        """Read a word of the control block."""
        return control.get(self.block, word)

    def set_phase(self, phase: control.Phase) -> None:
        """Say what the script does now; its deadline starts."""
        control.set_phase(self.block, phase)
        self.put(Word.BOUNDARY_NS, time.monotonic_ns())

    def store_client(self, timeout_seconds: float = 30.0) -> TCPStore:
        """A new connection to the attempt's store: one per thread, since a waiting call blocks its connection."""
        address = self._torch_store or (self.welcome.store_address if self.welcome is not None else "")
        if not address:
            raise RuntimeError("the attempt's store is not known yet")
        host, _, port = address.rpartition(":")
        timeout = datetime.timedelta(seconds=timeout_seconds)
        return TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)

    # -- messages ---------------------------------------------------------------------------------

    def _greeting(self) -> Iterable[Any]:
        resumed, self._greeted = self._greeted, True
        yield wire.RankHello(
            rank=self.rank, attempt=self.attempt, pid=os.getpid(), store_address=self.store_address, resumed=resumed
        )
        yield from tuple(self._notices)
        step = self.get(Word.STEP)
        if step:
            yield wire.Boundary(step=step - 1)
        yield from tuple(self._repeated.values())
        if self.gate.held:
            yield self.gate.state()

    def _handle(self, message: Any) -> None:
        if isinstance(message, wire.Welcome):
            if message.attempt == self.attempt and self.welcome is None:
                self.welcome = message
                self._welcomed.set()
        elif isinstance(message, wire.Hold):
            self.gate.hold(message)
        elif isinstance(message, wire.Release):
            self.gate.release(message)
        elif isinstance(message, wire.MayExit):
            self._may_exit.set()
        elif isinstance(message, wire.DumpStacks):
            phase = control.get_phase(self.block)
            self.send(wire.Stacks(number=message.number, stack=stacks.dump(phase.name if phase else "")))
        elif type(message) in self._handlers:
            self._handlers[type(message)](message)
        elif isinstance(message, wire.NewPlan):
            self._plans.append(message)
        elif isinstance(message, wire.CopyLive):
            error = "the script has not restored yet, there is no live state"
            self.send(wire.LiveCopyDone(number=message.number, step=message.step, error=error))

    def _host_store(self) -> TCPStore:
        # Waiting calls of ranks that come late must outlast their imports and model construction.
        timeout = datetime.timedelta(minutes=30)
        if self._torch_store:
            host, _, port = self._torch_store.rpartition(":")
            # Shared with the process group of this process, whichever of the two is made first.
            return TCPStore(host, int(port), None, True, timeout, wait_for_workers=False, multi_tenant=True)
        address = os.environ.get(environment.ADDRESS, "127.0.0.1")
        return TCPStore(address, 0, None, True, timeout, wait_for_workers=False)


def _topology() -> Topology:
    workers = int(os.environ.get(environment.WORKERS, "1"))
    processes = int(os.environ.get(environment.PROCESSES_PER_WORKER, os.environ.get("WORLD_SIZE", "1")))
    return Topology(workers=workers, processes_per_worker=processes)


def _map_control(folder: str, rank: int) -> memoryview:
    path = os.path.join(folder, volume.control(rank))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < control.BLOCK_BYTES:
            os.posix_fallocate(file, 0, control.BLOCK_BYTES)
        return memoryview(mmap.mmap(file, control.BLOCK_BYTES))
    finally:
        os.close(file)
