"""The acting coordinator of a job on one machine: from the lock to the end, with everything cleaned up behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import signal
import time
from collections.abc import Sequence
from typing import Any

from lastwords.protocol import codec
from lastwords.protocol.messages import Hello
from lastwords_operator.coordinator.channel import Channel
from lastwords_operator.coordinator.gather import Term
from lastwords_operator.coordinator.loop import Loop
from lastwords_operator.core import decide
from lastwords_operator.core.model import JobSpec, JobState, JobStatus
from lastwords_operator.core.observation import AGENT, Decision, Event, Observation
from lastwords_operator.local import inject, outcome
from lastwords_operator.local.folder import JobFolder, read_lines, replace_file
from lastwords_operator.local.journal import Journal
from lastwords_operator.local.store import FileEvents, FileStatusStore, SystemClock, next_epoch
from lastwords_operator.local.tail import Tail
from lastwords_operator.local.workers import LocalWorkers, Recipe
from lastwords_operator.view import build
from lastwords_operator.view.model import JobView
from lastwords_operator.view.show import Display

DRAW_SECONDS = 0.1
WRITE_SECONDS = 0.5
END_SECONDS = 15.0
"""How long workers may take to end by themselves once the job is over."""

_log = logging.getLogger(__name__)


class Session:
    """One `lastwords run` that acts. The lock is held and the folder prepared."""

    def __init__(
        self,
        folder: JobFolder,
        spec: JobSpec,
        recipe: Recipe,
        faults: Sequence[inject.Fault],
        display: Display,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._display = display
        self._clock = SystemClock()
        self._events = [*read_lines(folder.events_file)][-build.EVENTS_SHOWN :]
        self._sink = FileEvents(folder, self._on_event)
        self._workers = LocalWorkers(folder, recipe, self._poke)
        self._channel = Channel(admit=self._admit, on_change=self._poke)
        self._injector = inject.Injector(faults, folder.injected_file, spec.processes_per_worker, self._lose)
        self._tails = [Tail(folder.logs / f"trainer-{worker}.log") for worker in range(spec.workers)]
        self._recipe = recipe
        self._journal = Journal()
        self._loop: Loop | None = None
        self._seen: tuple[Observation, JobStatus] | None = None
        self._over_at: float | None = None
        self._exit_code = outcome.STOPPED
        self._interrupts = 0
        self._token = folder.token()
        self._started_at = folder.job_file.stat().st_mtime

    async def run(self) -> int:
        """Until the job is over or was stopped; the exit code."""
        with contextlib.ExitStack() as stack:
            self._take_signals(stack)
            epoch = next_epoch(self._folder)
            term = Term(spec=self._spec, epoch=epoch, started_at=self._clock.now())
            await self._channel.start(self._folder.socket)
            adopted = self._workers.start()
            if adopted:
                await self._tell("Adopted", f"found running: {', '.join(adopted)}")
            self._loop = Loop(
                term=term,
                decide=decide.decide,
                store=FileStatusStore(self._folder),
                links=self._channel,
                workers=self._workers,
                clock=self._clock,
                events=self._sink,
                passed=self._passed,
            )
            shower = asyncio.create_task(self._show())
            try:
                await self._loop.run()
            except BaseException:
                self._display.close(None)
                raise
            finally:
                shower.cancel()
                await asyncio.gather(shower, return_exceptions=True)
                await self._channel.stop()
            return await self._end()

    # --- passes -------------------------------------------------------------------------------------

    def _poke(self) -> None:
        if self._loop is not None:
            self._loop.poke()

    def _admit(self, hello: Hello) -> str:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the token is not this job's"
        if not 0 <= hello.worker < self._spec.workers:
            return f"there is no worker {hello.worker}"
        if hello.incarnation != self._workers.incarnation(hello.worker):
            return f"worker {hello.worker} has been replaced"
        return ""

    def _lose(self, worker: int) -> None:
        incarnation = self._workers.incarnation(worker)
        self._losing = asyncio.get_running_loop().create_task(self._workers.replace(worker, incarnation))

    def _passed(self, seen: Observation, decision: Decision) -> bool:
        """After each pass: make due faults; False once the job is over and its workers have ended."""
        self._seen = (seen, decision.status)
        self._journal.note(seen, decision)
        reports = {view.worker: view.report for view in seen.workers if view.report is not None and view.connected}
        for text in self._injector.step(reports, self._workers.containers()):
            asyncio.get_running_loop().create_task(self._tell("Injected", text))
        if self._interrupts > 1:
            return False
        if not (decision.status.state.over or decision.status.state is JobState.SUSPENDED):
            self._over_at = None
            return True
        if self._over_at is None:
            self._over_at = time.monotonic()
            self._exit_code = outcome.exit_code(decision.status)
            with contextlib.suppress(OSError):
                outcome.write(self._folder, self._exit_code)
        # A launcher hears of the end from its agent: without one nothing is worth waiting for.
        running = any(AGENT in row.pids for row in self._workers.containers())
        return running and time.monotonic() - self._over_at < END_SECONDS

    async def _end(self) -> int:
        """Leave nothing behind but what is still needed."""
        assert self._seen is not None
        status = self._seen[1]
        left = await self._workers.finish(0.0)
        if left:
            await self._tell("LeftBehind", f"could not be ended: {', '.join(left)}")
        self._drain()
        hard = not status.state.over and status.state is not JobState.SUSPENDED
        code = outcome.STOPPED if hard else self._exit_code
        if hard or status.kept_in_memory:
            where = f"the newest state is kept in {self._folder.memory}; the same command goes on from there"
            await self._tell("KeptInMemory", where)
        view = dataclasses.replace(self._view(), finished=True, exit_code=code)
        if not (hard or status.kept_in_memory):
            self._folder.remove_volumes()
        self._display.close(view)
        with contextlib.suppress(OSError):
            replace_file(self._folder.path / "last-view.json", codec.dumps(view))
        self._folder.remove_runtime()
        return code

    # --- signals ------------------------------------------------------------------------------------

    def _take_signals(self, stack: contextlib.ExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
            loop.add_signal_handler(number, self._interrupt, name)
            stack.callback(loop.remove_signal_handler, number)

    def _interrupt(self, name: str) -> None:
        self._interrupts += 1
        if self._loop is None:
            return
        if self._interrupts == 1:
            self._loop.stop_requested = name
            note = f"{name}: stopping after a step that all ranks save; once more ends the job at once"
        else:
            note = f"{name} again: ending at once, without last words"
        asyncio.get_running_loop().create_task(self._tell("Interrupted", note))
        self._loop.poke()

    # --- showing ------------------------------------------------------------------------------------

    async def _tell(self, reason: str, message: str) -> None:
        await self._sink.emit(self._clock.now(), Event(reason=reason, message=message))

    def _on_event(self, row: dict[str, Any]) -> None:
        self._events = [*self._events, row][-build.EVENTS_SHOWN :]
        self._display.event(build.event_view(row))

    def _view(self) -> JobView:
        assert self._seen is not None
        seen, status = self._seen
        return build.job_view(
            seen,
            status,
            self._workers.containers(),
            folder=str(self._folder.path),
            started_at=self._started_at,
            events=self._events,
        )

    def _drain(self) -> None:
        for tail in self._tails:
            for line in tail.read():
                self._display.log(line)

    async def _show(self) -> None:
        written = 0.0
        while True:
            self._drain()
            if self._seen is not None:
                view = self._view()
                self._display.update(view)
                if time.monotonic() - written >= WRITE_SECONDS:
                    written = time.monotonic()
                    with contextlib.suppress(OSError):
                        replace_file(self._folder.view_file, codec.dumps(view))
            await asyncio.sleep(DRAW_SECONDS)
