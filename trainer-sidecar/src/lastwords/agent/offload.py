"""
Blocking calls with a deadline. A thread that is stuck in a file system is left behind, never waited for.

The threads are daemons, so that a stuck one does not keep the process from ending either.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lastwords.storage.base import StorageError

T = TypeVar("T")


class Offload:
    """At most `threads` calls at a time; `abandoned` counts calls that passed their deadline and still go on."""

    def __init__(self, name: str, threads: int = 2, most_abandoned: int = 8) -> None:
        self._name = name
        self._slots = asyncio.Semaphore(threads)
        self._most_abandoned = most_abandoned
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self.abandoned = 0

    async def run(self, action: Callable[[], T], deadline_seconds: float, what: str = "storage") -> T:
        """The result of `action()`. Raises StorageError of kind "stalled" after the deadline."""
        if self.abandoned >= self._most_abandoned:
            raise StorageError(f"{what} does not answer: {self.abandoned} calls are stuck in it", "stalled")
        async with self._slots:
            return await self._run(action, deadline_seconds, what)

    async def _run(self, action: Callable[[], T], deadline_seconds: float, what: str) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start()

        def work() -> None:
            try:
                result, error = action(), None
            except BaseException as problem:
                result, error = None, problem
            try:
                loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:
                pass  # the loop has ended meanwhile

        def done(result: Any, error: BaseException | None) -> None:
            self._idle.append(inbox)
            if future.done():
                self.abandoned -= 1
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        inbox.put(work)
        try:
            return await asyncio.wait_for(asyncio.shield(future), deadline_seconds)
        except asyncio.TimeoutError:
            if future.done():
                return future.result()
            raise StorageError(f"{what} did not answer within {deadline_seconds:.0f} seconds", "stalled") from None
        finally:
            if not future.done():
                future.cancel()
                self.abandoned += 1

    def _start(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def serve() -> None:
            while (work := inbox.get()) is not None:
                work()

        threading.Thread(target=serve, name=self._name, daemon=True).start()
        return inbox
