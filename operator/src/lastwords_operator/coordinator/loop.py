"""The loop: gather, decide, apply; again when something changed, when the decision asked for it, and each second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from lastwords_operator.coordinator import apply, gather, ports
from lastwords_operator.core import observation
from lastwords_operator.core.model import JobStatus

COALESCE_SECONDS = 0.003
"""Reports of several workers about one thing come together: one pass for them."""
LONGEST_WAIT_SECONDS = 1.0

Decide = Callable[[observation.Observation], observation.Decision]
Passed = Callable[[observation.Observation, observation.Decision], bool]

_log = logging.getLogger(__name__)


class Loop:
    """
    One job's coordinator. `passed` is called after each applied pass and says whether to go on;
    `poke` may be called by anybody on the same event loop.
    """

    def __init__(
        self,
        *,
        term: gather.Term,
        decide: Decide,
        store: ports.StatusStore,
        links: ports.Links,
        workers: ports.Workers,
        clock: ports.Clock,
        events: ports.Events,
        passed: Passed,
    ) -> None:
        self._term = term
        self._decide = decide
        self._store = store
        self._links = links
        self._workers = workers
        self._clock = clock
        self._events = events
        self._passed = passed
        self._poked = asyncio.Event()
        self._reason = ""
        self.stop_requested = ""
        """Why the user wants the job to stop; "" = he does not."""

    def poke(self) -> None:
        """Something changed: look again soon."""
        self._poked.set()

    async def run(self) -> None:
        """Until `passed` says that it is enough."""
        status, version = await self._store.load()
        while True:
            self._poked.clear()
            seen = gather.gather(
                self._term,
                status or JobStatus(),
                self._clock.now(),
                self._links,
                self._workers,
                self.stop_requested,
            )
            decision = self._decide(seen)
            try:
                version = await apply.apply(
                    decision,
                    status=seen.status,
                    version=version,
                    now=seen.now,
                    store=self._store,
                    links=self._links,
                    workers=self._workers,
                    events=self._events,
                )
            except ports.ConflictError:
                _log.warning("the status was changed by somebody else; deciding again")
                status, version = await self._store.load()
                continue
            except OSError as error:
                # Nothing was ordered. Workers go on with what they have; the next pass decides afresh.
                self._say(f"the status cannot be written, nothing is decided until it can: {error}", logging.ERROR)
                await self._wait(None)
                continue
            status = decision.status
            self._say(decision.reason, logging.INFO)
            if not self._passed(seen, decision):
                return
            await self._wait(decision.wake_at)

    def _say(self, text: str, level: int) -> None:
        """Log what is new."""
        if text != self._reason:
            self._reason = text
            _log.log(level, "%s", text)

    async def _wait(self, wake_at: float | None) -> None:
        wait = LONGEST_WAIT_SECONDS
        if wake_at is not None:
            wait = min(wait, wake_at - self._clock.now())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._poked.wait(), max(wait, COALESCE_SECONDS))
            await asyncio.sleep(COALESCE_SECONDS)
