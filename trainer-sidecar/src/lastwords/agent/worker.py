"""Everything an agent knows about its worker, and what it makes of each message of launcher and ranks."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from lastwords.agent import memory as memory_
from lastwords.agent.local import Connection
from lastwords.agent.memory import Memory
from lastwords.agent.ranks import Rank
from lastwords.agent.settings import Settings
from lastwords.agent.volume import Volume
from lastwords.protocol import wire
from lastwords.protocol.messages import Notice, Prepared, RunState, WorkerOrder
from lastwords.protocol.pieces import Topology

log = logging.getLogger("lastwords.agent")

_MOST_NOTICES = 50


class Worker:
    """State only; what follows from it is decided elsewhere (`starting`, `holding`, `saving`)."""

    def __init__(self, settings: Settings, volume: Volume) -> None:
        self.settings = settings
        self.volume = volume
        self.memory: Memory = memory_.load(settings.volume, settings.job_uid)
        self.launcher: Connection | None = None
        self.launcher_hello: wire.LauncherHello | None = None
        self.processes: wire.Processes | None = None
        """As the connected launcher last said; None before that."""
        self.ranks: dict[int, Rank] = {}
        self.store_address = ""
        self.stop_requested = ""
        self.notices: dict[tuple[str, int | None], Notice] = {}
        self.prepared: Prepared | None = None
        self.stops_sent: tuple[int, Connection | None] = (0, None)
        self.runs_sent: tuple[int, Connection | None, str] = (0, None, "")
        """Attempt, to whom, and the store's address that was told with it."""
        self.found_sent: tuple[dict[int, int], Connection | None] = ({}, None)
        self.stop_answered = False
        """The launcher has said something since it was told to stop the attempt in force."""
        self._begin(self.memory.started_attempt)

    @property
    def number(self) -> int:
        """Which worker this is."""
        return self.settings.worker

    @property
    def order(self) -> WorkerOrder | None:
        """The newest order."""
        return self.memory.order

    @property
    def attempt(self) -> int:
        """Attempt whose ranks were started here last; 0 = none."""
        return self.memory.started_attempt

    @property
    def topology(self) -> Topology:
        """Workers and ranks of the job."""
        return self.order.topology if self.order is not None else self.settings.topology

    @property
    def own_ranks(self) -> range:
        """Ranks of this worker."""
        return self.topology.ranks_of(self.number)

    @property
    def replicas(self) -> int:
        """How many other workers keep this one's snapshots."""
        return min(self.order.replicas if self.order is not None else 0, self.topology.workers - 1)

    @property
    def kept_ranks(self) -> tuple[int, ...]:
        """Ranks whose parts may be here: the own ones, and those of the workers whose replicas this one keeps."""
        owners = ((self.number - distance) % self.topology.workers for distance in range(self.replicas + 1))
        return tuple(rank for owner in owners for rank in self.topology.ranks_of(owner))

    @property
    def current(self) -> WorkerOrder | None:
        """The order, when it is about the attempt whose ranks are here and wants them to run."""
        order = self.order
        if order is None or order.attempt != self.attempt or order.run is not RunState.RUNNING:
            return None
        return order

    def remember(self, **changes: Any) -> None:
        """Change the memory and put it where the next agent finds it."""
        changed = dataclasses.replace(self.memory, **changes)
        if changed != self.memory:
            memory_.store(self.settings.volume, changed)
            self.memory = changed

    def notice(self, code: str, text: str, *, rank: int | None = None, fatal: bool = False) -> None:
        """Tell the user something, once per code and rank."""
        self.notices[code, rank] = Notice(code=code, text=text, rank=rank, fatal=fatal)
        while len(self.notices) > _MOST_NOTICES:
            self.notices.pop(next(iter(self.notices)))

    def take_order(self, order: WorkerOrder) -> bool:
        """Take in an order of the coordinator; False when it is an old one."""
        known = self.order
        if known is not None and (order.epoch, order.number) < (known.epoch, known.number):
            return False
        if known is not None and order.attempt < known.attempt:
            log.warning("order of attempt %d refused: %d is known", order.attempt, known.attempt)
            return False
        self.remember(order=order)
        return True

    def start_attempt(self, attempt: int) -> None:
        """From now on this attempt's ranks are here; said before they are ordered from the launcher."""
        hello = self.launcher_hello
        self.remember(started_attempt=attempt, started_by=hello.pid if hello is not None else 0, held_attempt=0)
        self._begin(attempt)

    def any_alive(self) -> bool:
        """Whether there is a rank process of any attempt, as far as is known."""
        known = self.processes.processes if self.processes is not None else ()
        listed = any(process.alive or process.command_alive for process in known)
        return listed or self.start_pending() or any(rank.alive for rank in self.ranks.values())

    def start_pending(self) -> bool:
        """Whether ranks were ordered from the launcher and it has neither listed nor stopped them yet."""
        ordered = self.runs_sent[:2] == (self.attempt, self.launcher) and self.launcher is not None
        listed = self.processes is not None and self.processes.attempt == self.attempt and self.processes.processes
        return ordered and not listed and not self.stop_answered

    @property
    def wrapped(self) -> bool:
        """Whether ranks are not started by the launcher, but found in the command's process tree."""
        return self.launcher_hello is not None and self.launcher_hello.wrapped

    def launcher_known(self) -> bool:
        """Whether the launcher that is connected has said what it runs."""
        return self.launcher is not None and self.processes is not None

    # -- messages ---------------------------------------------------------------------------------

    def take(self, connection: Connection, message: Any) -> Rank | None:
        """Take in a message; the rank of the attempt in force that it came from, or None."""
        if isinstance(message, wire.LauncherHello):
            self._launcher_hello(connection, message)
        elif isinstance(message, wire.RankHello):
            return self._rank_hello(connection, message)
        elif connection is self.launcher:
            if isinstance(message, wire.Processes):
                self._take_processes(message)
            elif isinstance(message, wire.StopRequested):
                self.stop_requested = message.reason
        else:
            rank = next((rank for rank in self.ranks.values() if rank.connection is connection), None)
            if rank is not None:
                self._from_rank(rank, message)
            return rank
        return None

    def lost(self, connection: Connection) -> None:
        """A connection is over."""
        if connection is self.launcher:
            self.launcher = self.processes = None
            for rank in self.ranks.values():
                rank.launcher_gone = True
        for rank in self.ranks.values():
            if rank.connection is connection:
                rank.disconnect()

    def _begin(self, attempt: int) -> None:
        self.store_address = ""
        self.stop_answered = False
        self.ranks = {rank: Rank(rank, attempt) for rank in self.own_ranks} if attempt else {}
        self.prepared = None
        if attempt and self.memory.prepared_attempt == attempt:
            self.prepared = Prepared(attempt=attempt, ok=True)

    def _launcher_hello(self, connection: Connection, hello: wire.LauncherHello) -> None:
        self.launcher, self.launcher_hello, self.processes = connection, hello, None
        for code, text in hello.notices.items():
            self.notice(code, text)
        other = hello.pid != self.memory.started_by
        for rank in self.ranks.values():
            rank.launcher_gone = other
            if other:
                # It knows nothing of our ranks, and has killed what was left of them.
                rank.process = None

    def _take_processes(self, message: wire.Processes) -> None:
        self.processes = message
        if message.cold_reason:
            self.notice("cold-starts", f"ranks are started as new interpreters, not forked: {message.cold_reason}")
        self.stop_answered = self.stops_sent[1] is self.launcher and self.stops_sent[0] >= self.attempt
        if message.attempt > self.attempt:
            log.warning("the launcher runs attempt %d, which is not known here", message.attempt)
            self.start_attempt(message.attempt)
        if message.attempt == self.attempt:
            self.store_address = message.store_address or self.store_address
            for process in message.processes:
                rank = self.ranks.get(process.rank)
                if rank is not None:
                    rank.process = process

    def _rank_hello(self, connection: Connection, hello: wire.RankHello) -> Rank | None:
        if hello.attempt > self.attempt:
            self.start_attempt(hello.attempt)
        rank = self.ranks.get(hello.rank)
        if hello.attempt != self.attempt or rank is None:
            log.warning("rank %d of attempt %d is not served: attempt %d is in force", hello.rank, hello.attempt,
                        self.attempt)  # fmt: skip
            return None
        if self.wrapped and rank.pid not in (0, hello.pid):
            text = (
                f"The command started a second training process for rank {rank.rank} (process {hello.pid} after "
                f"{rank.pid}): in one job its command may run one script with a Checkpointer. Make each a job."
            )
            self.notice("second-process", text, rank=rank.rank, fatal=True)
            return None
        rank.pid = hello.pid
        rank.connect(connection)
        if hello.store_address:
            self.store_address = hello.store_address
        return rank

    def _from_rank(self, rank: Rank, message: Any) -> None:
        if isinstance(message, wire.SnapshotReady):
            rank.add_snapshot(message)
        elif isinstance(message, wire.HoldState):
            rank.hold_state = message
        elif isinstance(message, wire.Stacks):
            rank.stack = message.stack
        elif isinstance(message, wire.ScriptEnded):
            rank.ended = message
        elif isinstance(message, wire.Finished):
            rank.finished = message
        elif isinstance(message, wire.LayoutReady):
            self.remember(layout_generation=message.generation, layout_attempt=rank.attempt)
        elif isinstance(message, wire.RankNotice):
            self.notice(message.code, message.text, rank=rank.rank, fatal=message.fatal)
