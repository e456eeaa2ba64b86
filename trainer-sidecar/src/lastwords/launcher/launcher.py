"""
The launcher of a worker: runs, watches and ends rank processes as the agent orders, and leaves nothing behind.

Orders are idempotent and may come in any order; what is done follows from the newest ones. The agent may die and come
back at any time: it is told everything again. Ranks are never ended because the agent is away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

from lastwords.launcher import leftovers, programs, rank_environment
from lastwords.launcher.agent_link import AgentLink
from lastwords.launcher.children import Child, Children
from lastwords.launcher.output import Console, Output
from lastwords.launcher.programs import Program
from lastwords.launcher.ranks import Ranks
from lastwords.launcher.standbys import Standbys
from lastwords.launcher.wrapped import WrappedCommand
from lastwords.protocol import environment as names
from lastwords.protocol import wire

_REFILL_SECONDS = 20.0
"""New standbys are made this long after a start at the latest, else after its first step."""
_AGENT_AWAY_SECONDS = 30.0
"""After SIGTERM: how long an agent that is away is waited for."""
_ORPHAN_SECONDS = 120.0
"""Whoever started us is gone, so nobody starts the agent again: how long it is waited for."""
_GONE_SECONDS = 10.0
_BIRTH_SECONDS = 2.0
_POLL_SECONDS = 0.005
_TERMINATED = 128 + signal.SIGTERM
_BROKEN = 70


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the launcher."""

    volume: str
    worker: int
    uid: str
    logs: str


class Launcher:
    """One per process. `run` is its life; its result is the exit code."""

    def __init__(self, options: Options, program: Program) -> None:
        self._options = options
        self._program = program
        self._mark = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._common = rank_environment.base(
            programs.with_variables(os.environ, program.variables),
            uid=options.uid,
            launcher=self._mark,
            worker=options.worker,
            volume=options.volume,
        )
        self._parent = os.getppid()
        self._stop_reason = ""
        self._run_order: wire.RunRanks | None = None
        self._stop_order: wire.StopRanks | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._refill_task: asyncio.Task[None] | None = None
        self._standbys: Standbys | None = None
        self._ranks: Ranks | WrappedCommand | None = None
        self._guard: Child | None = None
        self._guard_pipe = -1

    async def run(self) -> int:
        """
        Serve the agent until told to end.

        The exit code: 0 as ordered, 143 after signals or without an agent, 70 after an error of its own.
        """
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        self._console = Console(1)
        self._output = Output(self._console)
        self._children = Children()
        self._start_guard()
        await self._sweep()
        self._prepare()
        self._link = AgentLink(self._options.volume, self._greeting, self._handle, self._console.say)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._link.start()
        watch = self._spawn(self._watch())
        try:
            return await self._end
        finally:
            watch.cancel()
            await self._shut_down()

    # --- start and end ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        program = self._program
        if program.wrapped is not None:
            self._ranks = WrappedCommand(
                self._children,
                self._output,
                self._console,
                program.wrapped,
                self._options.logs,
                self._report,
                keep=lambda: {self._guard.pid} if self._guard is not None else set(),
            )
            return
        if program.runner is None or program.command is None:
            self._console.say(program.error)
            return
        self._standbys = Standbys(
            self._children,
            self._output,
            self._console,
            program.runner.prefix,
            self._common,
            self._report,
            zygote_log=os.path.join(self._options.logs, f"imports-{self._options.worker}.log"),
        )
        self._ranks = Ranks(self._standbys, self._console, program.command, self._options.logs, self._report)
        self._standbys.keep(int(self._common.get(names.PROCESSES_PER_WORKER, "1")), gentle=False)

    async def _shut_down(self) -> None:
        for task in (self._worker_task, self._refill_task):
            if task is not None:
                task.cancel()
        if self._standbys is not None:
            self._standbys.end()
        if self._ranks is not None:
            self._ranks.begin(self._ranks.attempt)
        self._run_order = self._stop_order = None
        await self._until_children_are_gone()
        await self._sweep()
        self._report()
        await self._link.close(1.0)
        await self._end_guard()
        await asyncio.to_thread(self._output.close, 2.0)
        await asyncio.to_thread(self._console.close, 2.0)

    async def _until_children_are_gone(self) -> None:
        deadline = asyncio.get_running_loop().time() + _GONE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            others = [child for child in self._children.alive() if child is not self._guard]
            if not others and (self._ranks is None or self._ranks.gone(self._ranks.attempt)):
                return
            for child in others:
                child.kill()
            await asyncio.sleep(_POLL_SECONDS)

    def _start_guard(self) -> None:
        """The guard outlives us and kills what ranks leave behind when we are killed."""
        if self._end.done():
            return
        read_end, write_end = os.pipe()
        if self._guard_pipe >= 0:
            os.close(self._guard_pipe)
        self._guard_pipe = write_end
        arguments = [sys.executable, "-I", "-S", leftovers.__file__, f"{names.LAUNCHER}={self._mark}"]
        inherited = {name: value for name, value in os.environ.items() if name != names.LAUNCHER}
        try:
            self._guard = self._children.spawn(arguments, inherited, stdin=read_end, output=2, on_exit=self._guard_died)
        except OSError as error:
            self._console.say(f"the guard process cannot be started: {error}")
        finally:
            os.close(read_end)

    def _guard_died(self, child: Child) -> None:
        if not self._end.done():
            asyncio.get_running_loop().call_later(1.0, self._start_guard)

    async def _end_guard(self) -> None:
        while self._guard is not None and self._guard.alive:
            self._guard.kill()
            await asyncio.sleep(_POLL_SECONDS)

    async def _sweep(self) -> None:
        """Kill what carries this worker's mark (an earlier launcher's, or escaped from its group) but no standby."""
        deadline = asyncio.get_running_loop().time() + _GONE_SECONDS
        marks = (f"{names.WORKER_UID}={self._options.uid}", f"{names.LAUNCHER}=")
        told = False
        while True:
            await self._until_standbys_are_known()
            found = leftovers.find(marks, self._standbys.process_ids() if self._standbys is not None else ())
            if not found:
                return
            if not told:
                self._console.say(f"killing processes that were left over: {', '.join(map(str, found))}")
                told = True
            leftovers.kill(found)
            if asyncio.get_running_loop().time() > deadline:
                self._console.say(f"processes that do not die: {', '.join(map(str, found))}")
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _until_standbys_are_known(self) -> None:
        """One that is just being forked has the marks, but no number yet."""
        deadline = asyncio.get_running_loop().time() + _BIRTH_SECONDS
        while self._standbys is not None and self._standbys.unborn() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    # --- signals ------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop_reason:
            self._console.say(f"{name} again: ending now")
            self._finish(_TERMINATED)
            return
        self._stop_reason = name
        self._link.send(wire.StopRequested(reason=name))

    async def _watch(self) -> None:
        """End when there is nobody who could still tell us to."""
        while True:
            await asyncio.sleep(0.5)
            away = self._link.away_seconds()
            if self._stop_reason and away > _AGENT_AWAY_SECONDS:
                self._console.say(f"{self._stop_reason}, and no agent for {away:.0f} seconds: ending")
                self._finish(_TERMINATED)
            elif os.getppid() != self._parent and away > _ORPHAN_SECONDS:
                self._console.say(f"whoever started this launcher is gone, and no agent for {away:.0f} seconds: ending")
                self._finish(_TERMINATED)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    # --- the agent ----------------------------------------------------------------------------------

    def _greeting(self) -> Iterator[Any]:
        program = self._program
        yield wire.LauncherHello(
            pid=os.getpid(), error=program.error, wrapped=program.wrapped is not None, notices=program.notices
        )
        yield self._processes()
        if self._stop_reason:
            yield wire.StopRequested(reason=self._stop_reason)

    def _processes(self) -> wire.Processes:
        if self._ranks is None:
            return wire.Processes(attempt=0, processes=())
        return self._ranks.report()

    def _report(self) -> None:
        self._link.send(self._processes())

    def _handle(self, message: Any) -> None:
        if isinstance(message, wire.EndLauncher):
            self._finish(0)
        elif self._ranks is None:
            self._report()
        elif isinstance(message, wire.RunRanks):
            self._take_run(message, self._ranks)
        elif isinstance(message, wire.StopRanks):
            self._take_stop(message, self._ranks)
        elif isinstance(message, wire.RanksFound) and isinstance(self._ranks, WrappedCommand):
            self._ranks.find(message)

    def _take_run(self, order: wire.RunRanks, ranks: Ranks | WrappedCommand) -> None:
        if order.attempt < ranks.attempt:
            self._report()
            return
        if order.attempt > ranks.attempt:
            ranks.begin(order.attempt)
        if ranks.missing(order):
            self._run_order = order
            self._work()
        else:
            self._report()

    def _take_stop(self, order: wire.StopRanks, ranks: Ranks | WrappedCommand) -> None:
        if self._run_order is not None and self._run_order.attempt <= order.attempt:
            self._run_order = None
        ranks.stop(order.attempt, order.grace_seconds)
        self._stop_order = order
        self._work()

    def _work(self) -> None:
        if self._worker_task is None or self._worker_task.done():
            self._worker_task = self._spawn(self._fulfil())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A launcher that has lost a task would wait for ever: end instead, and be started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._console.say("".join(traceback.format_exception(error)).rstrip())
            self._finish(_BROKEN)

    async def _fulfil(self) -> None:
        """Do what the newest orders say as soon as the processes of older attempts are gone."""
        ranks = self._ranks
        assert ranks is not None
        while self._run_order is not None or self._stop_order is not None:
            run, stop = self._run_order, self._stop_order
            if stop is not None and ranks.gone(stop.attempt):
                if not ranks.any_alive():
                    await self._sweep()
                if self._stop_order is stop:
                    self._stop_order = None
                self._report()
            elif run is not None and ranks.gone(run.attempt - 1):
                if not ranks.any_alive():
                    await self._sweep()
                if self._run_order is run:
                    self._run_order = None
                    self._start(run, ranks)
            else:
                await asyncio.sleep(_POLL_SECONDS)

    def _start(self, order: wire.RunRanks, ranks: Ranks | WrappedCommand) -> None:
        if isinstance(ranks, WrappedCommand):
            ranks.start(order, self._common)
            self._report()
            return
        assert self._standbys is not None
        self._standbys.keep(0, gentle=True)
        ranks.start(order, self._common)
        self._standbys.environment = {**self._common, **order.environment}
        if self._refill_task is not None:
            self._refill_task.cancel()
        self._refill_task = self._spawn(self._refill(len(order.ranks), ranks))

    async def _refill(self, count: int, ranks: Ranks) -> None:
        """New standbys once the ranks train, so that making them does not slow their start."""
        assert self._standbys is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REFILL_SECONDS
        while loop.time() < deadline and ranks.any_alive() and not ranks.all_stepped(self._options.volume):
            await asyncio.sleep(0.1)
        self._standbys.keep(count, gentle=ranks.any_alive())
