"""
Counts this rank's READY part of a step as soon as the job's promise for snapshots holds for it.

Without replicas that is at once. With them the part has to be kept by another worker first: so the floor is a step that
survives the loss of a worker, and the slot that other workers still read from is not overwritten.
"""

from __future__ import annotations

import time

from lastwords.protocol import wire
from lastwords.trainer.floors import Floors
from lastwords.trainer.session import Session

PATIENCE_SECONDS = 120.0
"""After so long without an answer of the agent the part counts without a replica."""


class Replication:
    """Between the stager, which makes parts READY, and the floors, which count them."""

    def __init__(self, session: Session, floors: Floors) -> None:
        self._floors = floors
        self._wanted = session.welcome is not None and session.welcome.replicas > 0
        self._waiting: dict[int, float] = {}
        session.on(wire.Replicated, self._on_replicated)

    def ready(self, step: int) -> None:
        """The part of `step` is READY here."""
        if not self._wanted:
            self._floors.count(step)
            return
        self._floors.expect(step)
        self._waiting[step] = time.monotonic() + PATIENCE_SECONDS

    def expire(self) -> None:
        """Called now and then while a slot is needed: an agent that does not answer must not end all snapshots."""
        now = time.monotonic()
        for step in [step for step, until in list(self._waiting.items()) if now >= until]:
            self._count(step)

    def _on_replicated(self, message: wire.Replicated) -> None:
        self._count(message.step)

    def _count(self, step: int) -> None:
        if self._waiting.pop(step, None) is not None:
            self._floors.count(step)
