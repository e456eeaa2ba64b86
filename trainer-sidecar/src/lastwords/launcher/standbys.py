"""
Standby interpreters: processes that have torch loaded and wait to be told which rank they are.

A cold start is a standby that gets its line before it is ready. The line goes over a socket pair; the process
answers "R" when everything is imported and "T" when it has taken the line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lastwords.launcher import rank_environment
from lastwords.launcher.children import CHANNEL_DESCRIPTOR, Child, Children
from lastwords.launcher.output import Console, Output, Stream

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclasses.dataclass(eq=False, kw_only=True)
class Standby:
    """A process that may become a rank."""

    child: Child
    stream: Stream
    at_load: dict[str, str]
    """Variables it was started with that cannot be changed later."""
    channel: socket.socket
    ready: bool = False
    taken: bool = False
    """It has confirmed its line: what happens to it from now on happened to a rank."""

    def hand_over(self, line: Mapping[str, Any]) -> None:
        """Make it a rank. Raises OSError when it is dead already."""
        self.channel.setblocking(True)
        self.channel.settimeout(5.0)
        self.channel.sendall(json.dumps(line).encode() + b"\n")
        self.channel.setblocking(False)

    def heard(self) -> bytes:
        """Take in what the process has said; empty when it is gone or has nothing more to say."""
        try:
            data = self.channel.recv(16)
        except OSError:
            return b""
        self.ready = self.ready or b"R" in data
        self.taken = self.taken or b"T" in data
        return data


class Standbys:
    """Keeps `wanted` standbys; one that dies is made again after a pause, and is no fault of the job."""

    def __init__(
        self,
        children: Children,
        output: Output,
        console: Console,
        runner: Sequence[str],
        environment: dict[str, str],
        on_change: Callable[[], None],
    ) -> None:
        self.environment = environment
        """What new standbys start with."""
        self._children = children
        self._output = output
        self._console = console
        self._runner = runner
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._wanted = 0
        self._gentle = False
        self._waiting: list[Standby] = []
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._retry: asyncio.TimerHandle | None = None

    def keep(self, wanted: int, *, gentle: bool) -> None:
        """
        Have `wanted` of them from now on, 0 = make no new ones. `gentle`: they are made one after the other, at the
        lowest priority, since training goes on beside.
        """
        self._wanted = wanted
        self._gentle = gentle
        self._fill()

    def ready(self) -> int:
        """How many have imported everything."""
        return sum(standby.ready for standby in self._waiting)

    def process_ids(self) -> set[int]:
        """Processes that wait."""
        return {standby.child.pid for standby in self._waiting}

    def take(self, environment: Mapping[str, str]) -> Standby:
        """
        One that can become a rank with this environment, ready ones first; a new one when none waits.

        Raises OSError when no process can be started.
        """
        at_load = rank_environment.at_load(environment)
        for standby in list(self._waiting):
            if standby.at_load != at_load:
                # Its libraries have read other values already.
                self._waiting.remove(standby)
                standby.child.kill()
        if not self._waiting:
            return self._start(environment, gentle=False)
        standby = min(self._waiting, key=lambda standby: not standby.ready)
        self._waiting.remove(standby)
        return standby

    def end(self) -> None:
        """Kill all that wait and make no new ones."""
        self._wanted = 0
        if self._retry is not None:
            self._retry.cancel()
        for standby in self._waiting:
            standby.child.kill()
        self._waiting.clear()

    def _fill(self) -> None:
        if self._retry is not None:
            return
        while len(self._waiting) < self._wanted:
            if self._gentle and any(not standby.ready for standby in self._waiting):
                return  # goes on when that one is ready
            try:
                self._waiting.append(self._start(self.environment, gentle=self._gentle))
            except OSError as error:
                self._console.say(f"a standby interpreter cannot be started: {error}")
                self._pause()
                return

    def _start(self, environment: Mapping[str, str], *, gentle: bool) -> Standby:
        ours, theirs = socket.socketpair()
        stream, output = self._output.open()
        arguments = [*self._runner, "--standby", str(CHANNEL_DESCRIPTOR), "--parent", str(os.getpid())]
        try:
            child = self._children.spawn(
                arguments + (["--gentle"] if gentle else []),
                environment,
                output=output,
                channel=theirs.fileno(),
                on_exit=lambda _: self._died(standby),
            )
        except OSError:
            ours.close()
            raise
        finally:
            os.close(output)
            theirs.close()
        standby = Standby(child=child, stream=stream, at_load=rank_environment.at_load(environment), channel=ours)
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._heard, standby)
        return standby

    def _heard(self, standby: Standby) -> None:
        was_ready = standby.ready
        if not standby.heard():
            self._loop.remove_reader(standby.channel.fileno())
            standby.channel.close()
        if standby.ready and not was_ready and standby in self._waiting:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
            self._on_change()
            self._fill()

    def _died(self, standby: Standby) -> None:
        """It died while it waited; `on_exit` of a rank is another one."""
        if standby not in self._waiting:
            return
        self._waiting.remove(standby)
        how = f"signal {standby.child.signal}" if standby.child.signal else f"exit code {standby.child.code}"
        last = standby.stream.tail().splitlines()[-1:]
        self._console.say(f"a standby interpreter ended ({how}); training is not affected. {''.join(last)}".rstrip())
        self._on_change()
        self._pause()

    def _pause(self) -> None:
        if self._retry is None and self._wanted:
            self._retry = self._loop.call_later(self._pause_seconds, self._try_again)
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _try_again(self) -> None:
        self._retry = None
        self._fill()
