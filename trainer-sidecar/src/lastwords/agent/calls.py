"""
Which periodic save the workers make: worker 0 chooses the step and calls the others.

A checkpoint needs all workers' parts of one step, and storage answers each of them in its own time. If everybody saved
the newest snapshot whenever it is free, workers with slow storage would save different steps and commit none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from aiohttp import web

from lastwords.agent.peers import PeerError, Peers
from lastwords.agent.worker import Worker
from lastwords.protocol.manifest import CheckpointId

log = logging.getLogger("lastwords.agent")

_AGAIN_SECONDS = 5.0
"""A worker whose agent was started anew hears it again."""
_PAUSE_SECONDS = 0.5


class Calls:
    """`on_change` is called when this worker was called."""

    def __init__(self, worker: Worker, peers: Peers, on_change: Callable[[], None]) -> None:
        self._worker = worker
        self._peers = peers
        self._on_change = on_change
        self._called: CheckpointId | None = None
        self._heard: dict[int, tuple[CheckpointId, float]] = {}
        self._telling: dict[int, asyncio.Task[None]] = {}

    @property
    def leads(self) -> bool:
        """Whether this worker chooses."""
        return self._worker.number == 0

    def choose(self, steps: Collection[int]) -> int | None:
        """Which of these steps of the attempt to save now; None: none of them."""
        if self.leads:
            return max(steps, default=None)
        called = self._called
        if called is None or called.attempt != self._worker.attempt or called.step not in steps:
            return None
        return called.step

    def repeat(self, checkpoint: CheckpointId) -> None:
        """Call the others to this save, those that have not heard of it lately."""
        if not self.leads:
            return
        now = time.monotonic()
        for other in range(1, self._worker.topology.workers):
            known, at = self._heard.get(other, (None, 0.0))
            if other not in self._telling and (known != checkpoint or now - at > _AGAIN_SECONDS):
                self._telling[other] = asyncio.create_task(self._tell(other, checkpoint))

    async def _tell(self, other: int, checkpoint: CheckpointId) -> None:
        try:
            await self._peers.call_save(other, checkpoint.step, checkpoint.attempt)
            self._heard[other] = (checkpoint, time.monotonic())
        except PeerError as error:
            log.debug("worker %d was not called to save step %d: %s", other, checkpoint.step, error)
            await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            del self._telling[other]

    def routes(self) -> list[web.RouteDef]:
        """POST /v1/saves/{attempt}/{step}: worker 0 saves this step."""
        return [web.post("/v1/saves/{attempt:\\d+}/{step:\\d+}", self._take)]

    async def _take(self, request: web.Request) -> web.Response:
        checkpoint = CheckpointId(step=int(request.match_info["step"]), attempt=int(request.match_info["attempt"]))
        if checkpoint != self._called:
            self._called = checkpoint
            self._on_change()
        return web.Response(status=204)

    async def stop(self) -> None:
        """Call nobody any more."""
        tasks = list(self._telling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
