"""
The launcher's side of a zygote: a process that has everything imported and forks rank processes on request.

A forked process is a child of the launcher from its first moment on, so the zygote's end takes none of them along.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from lastwords.launcher import rank_environment
from lastwords.launcher.children import CHANNEL_DESCRIPTOR, Child, Children
from lastwords.launcher.output import Output
from lastwords.launcher.standby import Standby

_FORK_SECONDS = 10.0
"""A zygote that has not made a process by then is stuck, and is killed."""


@dataclasses.dataclass(eq=False)
class _Request:
    standby: Standby
    channel: int
    output: int

    def close(self) -> None:
        os.close(self.channel)
        os.close(self.output)


class Zygote:
    """
    One zygote process. `on_change` is called when it is ready or over; `over` says why it makes no processes any more.

    Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        children: Children,
        output: Output,
        runner: Sequence[str],
        environment: Mapping[str, str],
        *,
        gentle: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.at_load = rank_environment.at_load(environment)
        self.ready = False
        self.over = False
        self.unsafe = ""
        """Why it must not be forked."""
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Request] = []
        self._unborn: dict[Standby, asyncio.TimerHandle] = {}
        self._said = b""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stream, write_end = output.open()
        arguments = [*runner, "--zygote", str(CHANNEL_DESCRIPTOR), "--parent", str(os.getpid())]
        try:
            self._child = children.spawn(
                arguments + (["--gentle"] if gentle else []),
                environment,
                output=write_end,
                channel=theirs.fileno(),
                on_exit=self._died,
            )
        except OSError:
            self._control.close()
            raise
        finally:
            os.close(write_end)
            theirs.close()
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._hear)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def attach_log(self, path: str) -> None:
        """What the imports print goes there and to the console."""
        self._stream.attach("imports", path)

    def ending(self) -> str:
        """How it died, with its last words."""
        if self._child.alive:
            return "it is being ended"
        how = f"signal {self._child.signal}" if self._child.signal else f"exit code {self._child.code}"
        return f"{how} {''.join(self._stream.tail().splitlines()[-1:])}".rstrip()

    def unborn(self) -> bool:
        """Some process is being made just now that is not known yet."""
        return bool(self._unborn)

    def fork(self, standby: Standby, channel: int, output: int) -> None:
        """Make a process for `standby`, as soon as that can be; takes over both descriptors."""
        request = _Request(standby, channel, output)
        standby.requested = False
        self._waiting.append(request)
        if self.ready:
            self._send_waiting()

    def born(self, standby: Standby) -> None:
        """It has told its number."""
        if (timer := self._unborn.pop(standby, None)) is not None:
            timer.cancel()

    def end(self) -> None:
        """Kill it. What it has forked goes on; what it has not is lost."""
        self._child.kill()
        self._close()

    def _hear(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        text = data.decode(errors="replace").strip()
        if text == "ready":
            self.ready = True
            self._send_waiting()
            self._on_change()
        else:
            self.unsafe = text.removeprefix("unsafe ") if text.startswith("unsafe ") else ""
            self.end()

    def _send_waiting(self) -> None:
        while self._waiting and not self.over:
            request = self._waiting[0]
            if not request.standby.lost:
                try:
                    socket.send_fds(self._control, [b"+"], [request.channel, request.output])
                except BlockingIOError:
                    self._loop.call_later(0.01, self._send_waiting)
                    return
                except OSError:
                    self.end()
                    return
                request.standby.requested = True
                self._unborn[request.standby] = self._loop.call_later(_FORK_SECONDS, self.end)
            request.close()
            del self._waiting[0]

    def _died(self, child: Child) -> None:
        self._close()

    def _close(self) -> None:
        if self.over:
            return
        self.over, self.ready = True, False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        waiting, self._waiting = self._waiting, []
        self._on_change()
        for request in waiting:
            request.close()
            request.standby.lose()
        for timer in self._unborn.values():
            timer.cancel()
