"""
Small records of a rank: the final one at each boundary, the provisional one before each update.

A provisional record lets a rank die in its update while others pass the boundary, and nothing is lost. It counts only
if what it says was always what the boundary then found; once that was not so (a buffer that changes after the update,
say) none are written any more.
"""

from __future__ import annotations

from lastwords.protocol.snapshots import RecordHead
from lastwords.trainer import hoststate, restoring, slots
from lastwords.trainer.collect import Collector
from lastwords.trainer.hoststate import Encoded
from lastwords.trainer.parts import Parts

_NOTHING = Encoded("null", hoststate.Table())


class Recorder:
    """Builds and writes the records of one rank in one attempt."""

    def __init__(
        self, parts: Parts, collector: Collector, rank: int, attempt: int, areas: slots.Records | None
    ) -> None:
        """`areas` None: records are only built (for storage), not kept in memory."""
        self._parts = parts
        self._collector = collector
        self._rank = rank
        self._attempt = attempt
        self._areas = areas
        self._provisional: Encoded | None = None
        self._compared = 0
        self._foreseeable = True

    def build(self, step: int, generation: int) -> bytes:
        """The final record of now. Raises HostStateError."""
        own = hoststate.encode_part("own", restoring.own_state(self._parts, self._collector))
        shared = hoststate.encode_part("shared", restoring.shared_state(self._parts, self._collector))
        if self._provisional is not None:
            self._compared += 1
            self._foreseeable = self._foreseeable and own.same_as(self._provisional)
            self._provisional = None
        return hoststate.build_record(self._head(step, generation, provisional=False), own, shared)

    def write(self, step: int, record: bytes) -> None:
        """Put a final record in place."""
        if self._areas is not None:
            self._areas.write(step, record, provisional=False)

    def write_provisional(self, step: int, generation: int) -> None:
        """Before the update that ends in `step`."""
        if not self._foreseeable or self._areas is None:
            return
        self._provisional = hoststate.encode_part("own", restoring.own_state(self._parts, self._collector))
        head = self._head(step, generation, provisional=True)
        self._areas.write(step, hoststate.build_record(head, self._provisional, _NOTHING), provisional=True)

    def _head(self, step: int, generation: int, *, provisional: bool) -> RecordHead:
        return RecordHead(
            step=step,
            attempt=self._attempt,
            rank=self._rank,
            generation=generation,
            provisional=provisional,
            exact=not provisional or self._compared > 0,
        )
