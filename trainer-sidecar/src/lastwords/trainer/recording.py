"""
Small records of a rank: the final one at each boundary, a provisional one before others can pass it.

A provisional record lets a rank die on its way to a boundary that others pass, and nothing is lost. Others can pass it
as soon as they have this rank's last gradients: so the *early* one is written when the backward pass begins. Where
that does not say what the boundary then finds (random numbers drawn after the backward pass, say), the *late* one is
written before the update. Each kind counts only if it was right at each past boundary, and is not written any more
once it was wrong.
"""

from __future__ import annotations

from lastwords.protocol.snapshots import RecordHead
from lastwords.trainer import hoststate, restoring, slots
from lastwords.trainer.collect import Collector
from lastwords.trainer.hoststate import Encoded
from lastwords.trainer.parts import Parts

_NOTHING = Encoded("null", hoststate.Table())


class _Forecast:
    """What a provisional record said of the coming boundary, and whether this kind was always right."""

    def __init__(self) -> None:
        self.said: Encoded | None = None
        self.right = True
        self.compared = 0

    @property
    def proven(self) -> bool:
        """Right so far, and that more than by default."""
        return self.right and self.compared > 0

    def compare(self, own: Encoded) -> bool:
        """At the boundary; whether the record that was written counts."""
        if self.said is None:
            return False
        counted = self.proven
        self.compared += 1
        self.right = self.right and own.same_as(self.said)
        self.said = None
        return counted and self.right


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
        self._early = _Forecast()
        self._late = _Forecast()
        self.foretold = False
        """Whether the early record of the newest boundary counts: it said what the boundary found, as ever before."""

    def build(self, step: int, generation: int) -> bytes:
        """The final record of now. Raises HostStateError."""
        own = hoststate.encode_part("own", restoring.own_state(self._parts, self._collector))
        shared = hoststate.encode_part("shared", restoring.shared_state(self._parts, self._collector))
        self.foretold = self._early.compare(own)
        self._late.compare(own)
        head = RecordHead(step=step, attempt=self._attempt, rank=self._rank, generation=generation)
        return hoststate.build_record(head, own, shared)

    def write(self, step: int, record: bytes) -> None:
        """Put a final record in place."""
        if self._areas is not None:
            self._areas.write(step, record, provisional=False)

    def write_provisional(self, step: int, generation: int, *, early: bool) -> bool:
        """
        When the last backward pass before the boundary of `step` begins (`early`), or before its update.

        Returns whether a record was written that counts.
        """
        forecast = self._early if early else self._late
        if not forecast.right or self._areas is None:
            return False
        if not early and self._early.proven and self._early.said is not None:
            return False  # what stands there says the same
        forecast.said = hoststate.encode_part("own", restoring.own_state(self._parts, self._collector))
        head = RecordHead(
            step=step,
            attempt=self._attempt,
            rank=self._rank,
            generation=generation,
            provisional=True,
            exact=forecast.proven,
        )
        self._areas.write(step, hoststate.build_record(head, forecast.said, _NOTHING), provisional=True)
        return forecast.proven
