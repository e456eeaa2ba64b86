"""Last words without a coordinator: when it has been away for too long, hold, keep the newest whole state, and end."""

from __future__ import annotations

import logging
import time

from lastwords.agent.holding import Holder
from lastwords.agent.saving import Saver
from lastwords.agent.worker import Worker
from lastwords.protocol.control import Word

log = logging.getLogger("lastwords.agent")

SETTLE_SECONDS = 2.0
"""After the hold: until running copies have ended and all ranks know the newest floor."""
OTHERS_SECONDS = 20.0
"""
The others began to save at about the same time. One that knew of no newer step than the last checkpoint has ended by
then, and the save that waits for its part would wait in vain.
"""
SAVE_SECONDS = 120.0


class CoordinatorLost:
    """`ending` becomes True when nothing is left to do but to stop the ranks and end."""

    def __init__(self, worker: Worker, holder: Holder, saver: Saver) -> None:
        self._worker = worker
        self._holder = holder
        self._saver = saver
        self._since: float | None = None
        self.ending = False

    def reconcile(self, away_seconds: float) -> None:
        """Step by step while the coordinator is away; all is taken back when it returns in time."""
        limit = self._worker.settings.coordinator_lost_seconds
        if self._worker.stop_requested:
            # Somebody wants this worker gone, and nobody will say so any more.
            limit = min(limit, SETTLE_SECONDS)
        if self.ending:
            return
        if away_seconds <= limit:
            self._since, self._holder.by_agent = None, False
            return
        now = time.monotonic()
        if self._since is None:
            log.warning("the coordinator has been away for %.0f seconds: keeping the state, then ending", away_seconds)
            self._since = now
            self._holder.by_agent = True
            self._holder.reconcile()
        elif not self._worker.any_alive():
            self.ending = self._saver.idle
        elif now - self._since > SETTLE_SECONDS:
            late = now - self._since > SETTLE_SECONDS + SAVE_SECONDS
            self.ending = self._kept() or self._saver.gave_up_on_others(OTHERS_SECONDS) or late

    def _kept(self) -> bool:
        """Save the newest step that is complete on all ranks; True when it is saved or there is none."""
        worker = self._worker
        blocks = (worker.volume.block(rank) for rank in worker.own_ranks)
        floor = max((block[Word.FLOOR_STEP] - 1 for block in blocks if block is not None), default=-1)
        if floor <= 0 or self._saver.committed(floor, worker.attempt):
            return self._saver.idle
        order = self._saver.of_all(floor, "last-words")
        if order is None or self._saver.hopeless(floor, worker.attempt):
            return self._saver.idle
        self._saver.save_now(order)
        return False
