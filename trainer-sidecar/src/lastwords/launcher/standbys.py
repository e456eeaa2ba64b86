"""
Standbys: processes that have torch loaded and wait to be told which rank they are.

They are forked from a zygote, ahead of time, so that one import serves the first start and every restart. Where that
process cannot be forked they are interpreters of their own. A cold start is a standby that gets its task before it
is ready. The task goes over a socket pair.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from lastwords.launcher import rank_environment
from lastwords.launcher.children import CHANNEL_DESCRIPTOR, Child, Children
from lastwords.launcher.output import Console, Output
from lastwords.launcher.standby import Standby
from lastwords.launcher.zygote import Zygote

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_ZYGOTE_TRIES = 3


class Standbys:
    """
    Keeps `wanted` standbys; one that dies is made again after a pause, and is no fault of the job.

    `cold_reason` says why they are not forked, "" while they are.
    """

    def __init__(
        self,
        children: Children,
        output: Output,
        console: Console,
        runner: Sequence[str],
        environment: dict[str, str],
        on_change: Callable[[], None],
        *,
        zygote_log: str,
    ) -> None:
        self.environment = environment
        """What new standbys start with."""
        self.cold_reason = ""
        self._children = children
        self._output = output
        self._console = console
        self._runner = runner
        self._on_change = on_change
        self._zygote_log = zygote_log
        self._loop = asyncio.get_running_loop()
        self._wanted = 0
        self._gentle = False
        self._zygote: Zygote | None = None
        self._zygote_deaths = 0
        """How many have died in a row without ever being ready."""
        self._waiting: list[Standby] = []
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._retry: asyncio.TimerHandle | None = None

    def keep(self, wanted: int, *, gentle: bool) -> None:
        """
        Have `wanted` of them from now on, 0 = make no new ones. `gentle`: what has to be imported for them is
        imported at the lowest priority, in one process at a time, since training goes on beside.
        """
        self._wanted = wanted
        self._gentle = gentle
        self._fill()

    def ready(self) -> int:
        """How many have imported everything."""
        return sum(standby.ready for standby in self._waiting)

    def process_ids(self) -> set[int]:
        """Processes that wait, and the one that they come from."""
        zygote = {self._zygote.pid} if self._zygote is not None else set()
        return zygote | {standby.pid for standby in self._waiting}

    def unborn(self) -> bool:
        """Some process is being made just now that `process_ids` does not have yet."""
        return self._zygote is not None and self._zygote.unborn()

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
                standby.kill()
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
        waiting, self._waiting = self._waiting, []
        for standby in waiting:
            standby.kill()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.end()

    # --- making them --------------------------------------------------------------------------------

    def _fill(self) -> None:
        if self._retry is not None:
            return
        while len(self._waiting) < self._wanted:
            one_by_one = self._gentle and self.cold_reason
            if one_by_one and any(not standby.ready for standby in self._waiting):
                return  # goes on when that one is ready
            try:
                self._waiting.append(self._start(self.environment, gentle=self._gentle))
            except OSError as error:
                self._console.say(f"a standby process cannot be started: {error}")
                self._pause()
                return

    def _start(self, environment: Mapping[str, str], *, gentle: bool) -> Standby:
        zygote = self._usable_zygote(environment, gentle)
        ours, theirs = socket.socketpair()
        stream, output = self._output.open()
        standby = Standby(stream=stream, at_load=rank_environment.at_load(environment), channel=ours)
        standby.on_exit = lambda: self._died(standby)
        ours.setblocking(False)
        if zygote is not None:
            zygote.fork(standby, theirs.detach(), output)
        else:
            try:
                standby.born(self._interpreter(standby, environment, theirs.fileno(), output, gentle))
            except OSError:
                ours.close()
                raise
            finally:
                os.close(output)
                theirs.close()
        self._loop.add_reader(ours.fileno(), self._heard, standby)
        return standby

    def _interpreter(
        self, standby: Standby, environment: Mapping[str, str], channel: int, output: int, gentle: bool
    ) -> Child:
        arguments = [*self._runner, "--standby", str(CHANNEL_DESCRIPTOR), "--parent", str(os.getpid())]
        return self._children.spawn(
            arguments + (["--gentle"] if gentle else []),
            environment,
            output=output,
            channel=channel,
            on_exit=lambda _: standby.on_exit(),
        )

    def _heard(self, standby: Standby) -> None:
        was_ready = standby.ready
        lines, open_ = standby.hear()
        for line in lines:
            if line.startswith("born ") and standby.child is None:
                self._born(standby, int(line.split()[1]))
        if not open_:
            self._loop.remove_reader(standby.channel.fileno())
            standby.channel.close()
            standby.lose()
        if standby.ready and not was_ready and standby in self._waiting:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
            self._on_change()
            self._fill()

    def _born(self, standby: Standby, pid: int) -> None:
        if self._zygote is not None:
            self._zygote.born(standby)
        try:
            standby.born(self._children.adopt(pid, lambda _: standby.on_exit()))
        except ChildProcessError:
            return  # dead and reaped: its channel ends, which tells the rest
        self._on_change()

    def _died(self, standby: Standby) -> None:
        """It died while it waited; `on_exit` of a rank is another one."""
        if standby not in self._waiting:
            return
        self._waiting.remove(standby)
        if standby.child is None:
            self._fill()  # it never lived: its zygote has ended, which was told
            return
        how = f"signal {standby.signal}" if standby.signal else f"exit code {standby.code}"
        last = standby.stream.tail().splitlines()[-1:]
        self._console.say(f"a standby process ended ({how}); training is not affected. {''.join(last)}".rstrip())
        self._on_change()
        self._pause()

    # --- the zygote ---------------------------------------------------------------------------------

    def _usable_zygote(self, environment: Mapping[str, str], gentle: bool) -> Zygote | None:
        """The one for this environment, a new one where that can be; None: interpreters have to do."""
        zygote = self._zygote
        if zygote is not None and zygote.at_load != rank_environment.at_load(environment):
            self._zygote = None
            zygote.end()
            zygote = None
        if zygote is None and not self.cold_reason and self._retry is None:
            try:
                zygote = Zygote(
                    self._children,
                    self._output,
                    self._runner,
                    environment,
                    gentle=gentle,
                    on_change=lambda: self._zygote_changed(zygote),
                )
            except OSError as error:
                self._console.say(f"the process that ranks are forked from cannot be started: {error}")
                self._pause()
                return None
            zygote.attach_log(self._zygote_log)
            self._zygote = zygote
        return zygote

    def _zygote_changed(self, zygote: Zygote | None) -> None:
        if zygote is None or zygote is not self._zygote:
            return
        if zygote.ready:
            self._zygote_deaths = 0
            return
        self._zygote = None
        if zygote.unsafe:
            self._give_up_forking(zygote.unsafe)
        else:
            self._zygote_deaths += 1
            self._console.say(f"the process that ranks are forked from ended ({zygote.ending()}); ranks go on")
            if self._zygote_deaths >= _ZYGOTE_TRIES:
                self._give_up_forking(f"the process to fork from ended {_ZYGOTE_TRIES} times: {zygote.ending()}")
            self._pause()

    def _give_up_forking(self, reason: str) -> None:
        self.cold_reason = reason
        self._console.say(f"ranks are started as new interpreters, which is slower: they cannot be forked, {reason}")
        self._on_change()

    def _pause(self) -> None:
        if self._retry is None and self._wanted:
            self._retry = self._loop.call_later(self._pause_seconds, self._try_again)
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _try_again(self) -> None:
        self._retry = None
        self._fill()
