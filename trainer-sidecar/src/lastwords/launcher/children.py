"""
Starting, watching and reaping the launcher's child processes.

The launcher is the subreaper of everything below it: orphans of ranks come to it and are reaped here, so that no zombie
stays where the launcher is process 1 of a container.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence

_PR_SET_CHILD_SUBREAPER = 36
CHANNEL_DESCRIPTOR = 3
"""Where a child finds the descriptor that it was given beside its output."""


class Child:
    """One child process; it leads its own process group, of the same number."""

    def __init__(self, pid: int, on_exit: Callable[[Child], None]) -> None:
        self.pid = pid
        self.on_exit = on_exit
        self.alive = True
        self.code: int | None = None
        self.signal: int | None = None
        self._pidfd = -1

    def watch(self, loop: asyncio.AbstractEventLoop, collect: Callable[[Child], None]) -> None:
        """Call `collect` the moment it dies."""
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            return  # a kernel or sandbox without it: SIGCHLD tells as well
        loop.add_reader(self._pidfd, collect, self)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """The process is dead."""
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def signal_group(self, number: int) -> None:
        """Send a signal to it and everything in its process group, as long as it has not been reaped."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        self.signal_group(signal.SIGKILL)

    def gone(self) -> bool:
        """Neither it nor any process of its group is left."""
        if self.alive:
            return False
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class Children:
    """All child processes of the launcher. One per process, made on the main thread of a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        output: int,
        channel: int | None = None,
        on_exit: Callable[[Child], None],
    ) -> Child:
        """
        Start a process as leader of a group of its own; `output` becomes its stdout and stderr.

        Raises OSError. Must be called on the main thread: the death signal of a child follows the thread that made it.
        """
        actions: list[tuple[object, ...]] = []
        if stdin is None:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        else:
            actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
        actions += [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        if channel is not None:
            actions.append((os.POSIX_SPAWN_DUP2, channel, CHANNEL_DESCRIPTOR))
        pid = os.posix_spawn(
            arguments[0],
            list(arguments),
            environment,
            file_actions=actions,
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD],
        )
        child = Child(pid, on_exit)
        self._children[pid] = child
        child.watch(self._loop, self._collect)
        return child

    def adopt(self, pid: int, on_exit: Callable[[Child], None]) -> Child:
        """
        Take a process that came to us because its parent has ended; it leads its own process group.

        Raises ChildProcessError when it is dead and reaped already.
        """
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        child = Child(pid, on_exit)
        self._children[pid] = child
        child.watch(self._loop, self._collect)
        return child

    def alive(self) -> list[Child]:
        """Those that have not been reaped."""
        return list(self._children.values())

    def _reap(self) -> None:
        """Reap whatever is dead: own children in case no pidfd told, and orphans that came to us."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            child = self._children.get(found.si_pid)
            if child is not None:
                self._collect(child)
            else:
                os.waitpid(found.si_pid, os.WNOHANG)

    def _collect(self, child: Child) -> None:
        if not child.alive or os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        # While the dead leader is not reaped its number cannot be given to another group.
        child.kill()
        _, status = os.waitpid(child.pid, 0)
        child.alive = False
        if os.WIFSIGNALED(status):
            child.signal = os.WTERMSIG(status)
        else:
            child.code = os.WEXITSTATUS(status)
        child.unwatch(self._loop)
        del self._children[child.pid]
        child.on_exit(child)
