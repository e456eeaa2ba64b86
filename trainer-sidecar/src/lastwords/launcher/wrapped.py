"""
A wrapped command: one process tree per worker, in which ranks are found when they have connected to the agent.

The launcher does not start ranks here, so it cannot keep replacements warm. It gives the command torchrun's variables,
watches the ranks that are found, and ends the whole tree, whatever process groups or sessions it has spread over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
from collections.abc import Callable

from lastwords.launcher import leftovers, rank_environment
from lastwords.launcher.children import Child, Children
from lastwords.launcher.foundrank import FoundRank
from lastwords.launcher.output import Console, Output, Stream
from lastwords.launcher.programs import Wrapped
from lastwords.protocol import environment as names
from lastwords.protocol import wire

_CANNOT_START = 126
_LIBRARY = "library"


@dataclasses.dataclass(eq=False, kw_only=True)
class Tree:
    """The command of one attempt. `child` None: it could not be started, `error` says why."""

    attempt: int
    ranks: tuple[int, ...]
    child: Child | None = None
    stream: Stream | None = None
    error: str = ""
    found: dict[int, FoundRank] = dataclasses.field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the command itself, or a rank of it, still runs."""
        command = self.child is not None and self.child.alive
        return command or any(found.alive for found in self.found.values())

    def process(self, rank: int) -> wire.RankProcess:
        """As the agent is told."""
        child, found = self.child, self.found.get(rank)
        if child is None or self.stream is None:
            return wire.RankProcess(
                rank=rank, pid=0, alive=False, code=_CANNOT_START, log_tail=self.error, command_alive=False
            )
        alive = found.alive if found is not None else child.alive
        code, number = child.code, child.signal
        if found is not None and not code and number is None:
            # The command is still there or has ended well, which says nothing of the rank.
            code, number = found.code, found.signal
        return wire.RankProcess(
            rank=rank,
            pid=found.pid if found is not None else child.pid,
            alive=alive,
            code=code,
            signal=number,
            log_tail="" if alive and child.alive else self.stream.tail(),
            command_alive=child.alive,
        )


class WrappedCommand:
    """
    The command's tree of the newest attempt, and what is still dying of older ones.

    `common` is the environment of everything the launcher starts; `on_change` is called whenever what `report` says
    has changed; `keep` are processes of the launcher that belong to no tree.
    """

    def __init__(
        self,
        children: Children,
        output: Output,
        console: Console,
        wrapped: Wrapped,
        logs: str,
        on_change: Callable[[], None],
        *,
        keep: Callable[[], set[int]],
    ) -> None:
        self.attempt = 0
        self._children = children
        self._output = output
        self._console = console
        self._wrapped = wrapped
        self._logs = logs
        self._on_change = on_change
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._tree: Tree | None = None
        self._older: list[Tree] = []
        self._kept_port: socket.socket | None = None
        self._store_address = ""
        self._kill_timer: asyncio.TimerHandle | None = None

    def report(self) -> wire.Processes:
        """What the agent is told."""
        tree = self._tree
        processes = tuple(tree.process(rank) for rank in tree.ranks) if tree is not None else ()
        return wire.Processes(attempt=self.attempt, processes=processes, store_address=self._store_address)

    def begin(self, attempt: int) -> None:
        """A newer attempt: everything of the older ones dies now."""
        if self._tree is not None:
            self._older.append(self._tree)
        self._tree = None
        self.attempt = attempt
        self._free_port()
        if self._older:
            self._kill()

    def missing(self, order: wire.RunRanks) -> bool:
        """Whether the command of the order was never started."""
        return self._tree is None

    def start(self, order: wire.RunRanks, common: dict[str, str]) -> None:
        """Start the command, unless it has to wait for the address of the attempt's store."""
        if self._tree is not None:
            return
        address = order.store_address or self._reserve(common)
        if not address:
            return
        tree = Tree(attempt=order.attempt, ranks=order.ranks)
        self._tree = tree
        environment = rank_environment.of_wrapped(
            {**common, **order.environment}, ranks=order.ranks, attempt=order.attempt, store_address=address
        )
        stream, output = self._output.open()
        arguments = [self._wrapped.path, *self._wrapped.words[1:]]
        try:
            self._add_library(environment)
            tree.child = self._children.spawn(
                arguments, environment, output=output, on_exit=lambda _: self._on_change()
            )
        except OSError as error:
            tree.error = f"the command cannot be started: {error}"
            self._console.say(tree.error)
        else:
            worker = environment[names.WORKER]
            stream.on_end = self._tell_from_thread
            stream.attach(f"worker {worker}", os.path.join(self._logs, f"worker-{worker}-a{order.attempt}.log"))
            tree.stream = stream
        finally:
            os.close(output)
        self._on_change()

    def find(self, message: wire.RanksFound) -> None:
        """Watch these processes of the command from now on."""
        tree = self._tree
        if tree is None or tree.attempt != message.attempt:
            return
        below = leftovers.below(os.getpid())
        for rank, pid in message.pids.items():
            own = tree.child is not None and tree.child.pid == pid
            if rank in tree.ranks and rank not in tree.found and pid in below and not own:
                tree.found[rank] = FoundRank(pid, tree.child, self._on_change)
        self._on_change()

    def stop(self, attempt: int, grace_seconds: float) -> None:
        """SIGTERM to the command of attempts up to `attempt` and SIGKILL to its whole tree after the grace."""
        tree = self._tree
        if tree is None or tree.attempt > attempt:
            return
        if grace_seconds > 0 and tree.child is not None and self._kill_timer is None:
            tree.child.signal_group(signal.SIGTERM)
            self._kill_timer = self._loop.call_later(grace_seconds, self._kill)
        elif grace_seconds <= 0:
            self._kill()

    def gone(self, attempt: int) -> bool:
        """Nothing is left of attempts up to `attempt`, children included; what their commands left is killed."""
        if self._tree is not None and self._tree.attempt > attempt:
            return all(tree.child is None or tree.child.gone() for tree in self._older)
        trees = [*self._older, *([self._tree] if self._tree is not None else [])]
        left = self._left()
        if not any(tree.child is not None and tree.child.alive for tree in trees):
            leftovers.kill(left)
        if left or any(tree.alive for tree in trees):
            return False
        self._older = []
        return True

    def any_alive(self) -> bool:
        """The command of the newest attempt, or a rank of it, lives."""
        return self._tree is not None and self._tree.alive

    def _kill(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
        for tree in (*self._older, self._tree):
            if tree is not None and tree.child is not None:
                tree.child.kill()
        # Each member of a tree may have made a group or session of its own, as torchrun does with its ranks.
        leftovers.kill(self._left())

    def _left(self) -> list[int]:
        """All orphans come to the launcher, so what is below it and is not its own was the command's."""
        return sorted(leftovers.below(os.getpid(), self._keep()))

    # --- what the command is given ------------------------------------------------------------------

    def _reserve(self, common: dict[str, str]) -> str:
        """
        On worker 0: an address for the attempt's TCPStore. The socket stays bound, without listening, so that nobody
        else is given the port; it does not prevent the store from listening there.
        """
        if common[names.WORKER] != "0":
            return ""
        if self._kept_port is None:
            self._kept_port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept_port.bind(("", 0))
            host = common.get(names.ADDRESS, "127.0.0.1")
            self._store_address = f"{host}:{self._kept_port.getsockname()[1]}"
        return self._store_address

    def _free_port(self) -> None:
        if self._kept_port is not None:
            self._kept_port.close()
        self._kept_port, self._store_address = None, ""

    def _add_library(self, environment: dict[str, str]) -> None:
        """Whatever Python the command uses finds this `lastwords`, and nothing else of our environment."""
        folder = os.path.join(environment[names.VOLUME], _LIBRARY)
        os.makedirs(folder, exist_ok=True)
        link = os.path.join(folder, "lastwords")
        if not os.path.islink(link):
            os.symlink(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), link)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), folder]))

    def _tell_from_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_change)
        except RuntimeError:
            pass  # the launcher has ended
