"""The rank processes of this worker: started from standbys, ended as whole process groups, reported as they are."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Iterable

from lastwords.launcher import rank_environment
from lastwords.launcher.commands import Command
from lastwords.launcher.output import Console
from lastwords.launcher.standby import Standby
from lastwords.launcher.standbys import Standbys
from lastwords.protocol import control, volume, wire
from lastwords.protocol.control import Word

_STARTS = 3
"""How often a rank is started whose process dies before it has even heard which rank it is."""
_CANNOT_START = 126


@dataclasses.dataclass(eq=False, kw_only=True)
class Rank:
    """One rank of one attempt. `standby` None: no process could be started, `error` says why."""

    rank: int
    attempt: int
    standby: Standby | None = None
    error: str = ""
    starts: int = 0
    stopped: bool = False
    """It was told to end: it is not started again."""

    @property
    def alive(self) -> bool:
        """Whether its process lives, or is still to be born."""
        return self.standby is not None and self.standby.alive

    def gone(self) -> bool:
        """Whether neither it nor anything of its process group is left."""
        return self.standby is None or self.standby.gone()

    def process(self) -> wire.RankProcess:
        """As the agent is told."""
        own = self.standby
        if own is None:
            return wire.RankProcess(rank=self.rank, pid=0, alive=False, code=_CANNOT_START, log_tail=self.error)
        tail = "" if own.alive else own.stream.tail()
        return wire.RankProcess(
            rank=self.rank, pid=own.pid, alive=own.alive, code=own.code, signal=own.signal, log_tail=tail
        )


class Ranks:
    """
    Ranks of the newest attempt, and what is still dying of older ones.

    `on_change` is called whenever what `report` says has changed.
    """

    def __init__(
        self,
        standbys: Standbys,
        console: Console,
        command: Command,
        logs: str,
        on_change: Callable[[], None],
    ) -> None:
        self.attempt = 0
        self._standbys = standbys
        self._console = console
        self._command = command
        self._logs = logs
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._ranks: dict[int, Rank] = {}
        self._older: list[Rank] = []
        self._order: wire.RunRanks | None = None
        self._common: dict[str, str] = {}
        self._kill_timer: asyncio.TimerHandle | None = None
        self._kill_at = 0.0

    def report(self) -> wire.Processes:
        """What the agent is told."""
        processes = tuple(rank.process() for _, rank in sorted(self._ranks.items()))
        return wire.Processes(
            attempt=self.attempt,
            processes=processes,
            standbys=self._standbys.ready(),
            cold_reason=self._standbys.cold_reason,
        )

    def begin(self, attempt: int) -> None:
        """A newer attempt: everything of the older ones dies now."""
        self._older += self._ranks.values()
        self._ranks = {}
        self.attempt = attempt
        for rank in self._older:
            _kill(rank)

    def start(self, order: wire.RunRanks, common: dict[str, str]) -> None:
        """Start those of the order's ranks that were never started; the older ones must be gone."""
        self._order = order
        self._common = common
        for number in order.ranks:
            if number not in self._ranks:
                rank = Rank(rank=number, attempt=order.attempt)
                self._ranks[number] = rank
                self._start(rank)

    def missing(self, order: wire.RunRanks) -> bool:
        """Whether some rank of the order was never started."""
        return any(rank not in self._ranks for rank in order.ranks)

    def stop(self, attempt: int, grace_seconds: float) -> None:
        """SIGTERM to all of attempts up to `attempt` and SIGKILL after the grace; an earlier SIGKILL stays due."""
        concerned = [rank for rank in self._all() if rank.attempt <= attempt and rank.alive]
        if not concerned:
            return
        now = self._loop.time()
        if self._kill_timer is not None:
            if self._kill_at <= now + grace_seconds:
                return
            self._kill_timer.cancel()
            self._kill_timer = None
        elif grace_seconds > 0:
            for rank in concerned:
                rank.stopped = True
                if rank.standby is not None:
                    rank.standby.signal_group(signal.SIGTERM)
        if grace_seconds > 0:
            self._kill_at = now + grace_seconds
            self._kill_timer = self._loop.call_later(grace_seconds, self._kill_now, concerned)
        else:
            self._kill_now(concerned)

    def gone(self, attempt: int) -> bool:
        """Nothing is left of attempts up to `attempt`, children included."""
        self._older = [rank for rank in self._older if not rank.gone()]
        return all(rank.gone() for rank in self._all() if rank.attempt <= attempt)

    def any_alive(self) -> bool:
        """Some rank process of the newest attempt lives."""
        return any(rank.alive for rank in self._ranks.values())

    def all_stepped(self, folder: str) -> bool:
        """Every rank of the newest attempt has made its first new step, as the control blocks in `folder` say."""
        return all(_has_stepped(folder, rank, self.attempt) for rank in self._ranks)

    def _all(self) -> Iterable[Rank]:
        return [*self._older, *self._ranks.values()]

    def _kill_now(self, ranks: Iterable[Rank]) -> None:
        self._kill_timer = None
        for rank in ranks:
            _kill(rank)

    def _start(self, rank: Rank) -> None:
        order = self._order
        assert order is not None
        environment = rank_environment.of_rank(
            self._common, order.environment, rank=rank.rank, ranks=order.ranks, attempt=order.attempt
        )
        rank.starts += 1
        try:
            standby = self._standbys.take(environment)
        except OSError as error:
            rank.error = f"the process cannot be started: {error}"
            self._console.say(f"rank {rank.rank}: {rank.error}")
            self._on_change()
            return
        rank.standby = standby
        standby.on_exit = lambda: self._died(rank, standby)
        standby.stream.on_end = self._tell_from_thread
        path = os.path.join(self._logs, f"rank-{rank.rank}-a{rank.attempt}.log")
        standby.stream.attach(f"rank {rank.rank}", path)
        command = self._command.for_local_rank(order.ranks.index(rank.rank))
        try:
            standby.hand_over(
                {
                    "rank": rank.rank,
                    "attempt": rank.attempt,
                    "environment": environment,
                    "folder": os.getcwd(),
                    "kind": command.kind.value,
                    "target": command.target,
                    "arguments": list(command.arguments),
                    "words": command.words(),
                }
            )
        except OSError:
            # Dead already, or it never reads: its death is told as usual and starts another one.
            standby.kill()
        self._on_change()

    def _died(self, rank: Rank, standby: Standby) -> None:
        standby.hear()  # it may have confirmed with its last breath
        if not standby.taken and not rank.stopped and rank.starts < _STARTS:
            self._start(rank)
        else:
            self._on_change()

    def _tell_from_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_change)
        except RuntimeError:
            pass  # the launcher has ended


def _kill(rank: Rank) -> None:
    rank.stopped = True
    if rank.standby is not None:
        rank.standby.kill()


def _has_stepped(folder: str, rank: int, attempt: int) -> bool:
    try:
        with open(os.path.join(folder, volume.control(rank)), "rb") as file:
            block = memoryview(file.read(control.BLOCK_BYTES))
    except OSError:
        return False
    if not control.is_valid(block) or control.get(block, Word.ATTEMPT) != attempt:
        return False
    return control.get(block, Word.FIRST_STEP_NS) > 0
