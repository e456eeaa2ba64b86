"""
This rank's early record reaches another worker before others can pass the boundary that it foretells.

Otherwise the loss of a whole worker could leave the survivors at a step of which the lost ranks' random numbers and
loader positions are nowhere. The way there and back takes place beside the backward pass; only its last gradient
waits, and only as long as the neighbour keeps up.
"""

from __future__ import annotations

import threading
import time

from lastwords.protocol import wire
from lastwords.trainer.session import Session

WAIT_SECONDS = 1.0
"""A neighbour that takes longer is not waited for again until it has caught up."""


class NeighbourRecords:
    """Offers early records and waits for them to be kept; nothing where the job has one worker only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._needed = session.topology.workers > 1
        self._offered = self._kept = 0
        self._behind = False
        self._changed = threading.Condition()
        session.on(wire.RecordKept, self._on_kept)

    def offer(self, step: int) -> None:
        """The early record of `step` is committed."""
        if self._needed:
            self._offered = step
            self._session.send(wire.RecordWritten(step=step))

    def wait(self) -> int:
        """Until the record that was offered last is kept, or it takes too long. Returns nanoseconds."""
        if self._kept >= self._offered or (self._behind and self._kept < self._offered - 1):
            return 0
        began = time.monotonic_ns()
        with self._changed:
            self._behind = not self._changed.wait_for(lambda: self._kept >= self._offered, WAIT_SECONDS)
        return time.monotonic_ns() - began

    def _on_kept(self, message: wire.RecordKept) -> None:
        with self._changed:
            self._kept = max(self._kept, message.step)
            self._changed.notify_all()
