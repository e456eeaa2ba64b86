"""
The live copy: what this process holds at a boundary goes into slots while the main thread is stuck.

The agent asks for it after a fault, for this rank's part and those of dead neighbours. It counts only if no update
had begun, the step is the wanted one, and both are still so after the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lastwords.protocol import areas, codec, tensorfile, wire
from lastwords.protocol.control import Word
from lastwords.trainer import faultpoints, hoststate, slots
from lastwords.trainer.session import Session
from lastwords.trainer.staging import Rest, Stager, commit


class LiveCopyError(Exception):
    """The live state is not what is wanted; the text says why."""


class LiveCopier:
    """Answers `CopyLive`. `rest(step)` gives the state at that boundary, if it is one of the last two."""

    def __init__(self, session: Session, stager: Stager, rest: Callable[[int], Rest | None]) -> None:
        self._session = session
        self._stager = stager
        self._rest = rest
        session.on(wire.CopyLive, self._begin)

    def _begin(self, order: wire.CopyLive) -> None:
        # Off the link's thread, which must go on to answer.
        threading.Thread(target=self._run, args=(order,), name="lastwords-live-copy", daemon=True).start()

    def _run(self, order: wire.CopyLive) -> None:
        try:
            with self._stager.lock:
                faultpoints.begin("live_copy")
                self._copy(order)
                faultpoints.end("live_copy")
            error = ""
        except (LiveCopyError, OSError) as problem:
            faultpoints.end("live_copy")
            error = str(problem)
        self._session.send(wire.LiveCopyDone(number=order.number, step=order.step, error=error))

    def _copy(self, order: wire.CopyLive) -> None:
        session = self._session
        rest = self._resting(order.step)
        table = self._stager.agreement.table(rest.layout_number)
        if table is None:
            raise LiveCopyError("the layouts of the ranks are not agreed yet")
        written = []
        for rank, index in sorted(order.parts.items()):
            slot = slots.Slot(session.folder, index, rank)
            ready = slot.committed()
            if ready is not None and (ready.step, ready.attempt) == (rest.step, session.attempt):
                continue
            try:
                part = self._stager.part_copy(rest.state, table, rank)
            except KeyError as missing:
                raise LiveCopyError(f"this rank does not hold {missing} of rank {rank}") from None
            areas.invalidate(slot.commit.view)
            data = slot.resize(part.nbytes)
            with session.gate.device.copying():
                part.run(data)
            written.append((slot, part, data))
        self._resting(order.step)
        if not rest.untouched(session.gate):
            raise LiveCopyError("a tensor has been changed since the boundary")
        for slot, part, data in written:
            record = rest.record if slot.rank == session.rank else self._neighbours_record(slot.rank, rest.step)
            if record is not None:
                slot.write_record(record)
            commit(slot, part, data, rest.step, session.attempt, table.generation)

    def _resting(self, step: int) -> Rest:
        session = self._session
        if session.gate.odd:
            raise LiveCopyError("an update has begun")
        rest = self._rest(step)
        if rest is None or session.get(Word.STEP) - 1 != step:
            at = session.get(Word.STEP) - 1
            raise LiveCopyError(f"the state is of step {at}, wanted is {step}")
        if session.gate.counter != rest.counter:
            raise LiveCopyError("an update has been made since the boundary")
        return rest

    def _neighbours_record(self, rank: int, step: int) -> bytes | None:
        """The final record of a dead neighbour at `step`, else an exact provisional one."""
        areas_ = slots.Records(self._session.folder, rank)
        for provisional in (False, True):
            body = areas_.read(step, provisional=provisional)
            try:
                head = hoststate.parse_record(body).head if body is not None else None
            except (codec.DecodeError, tensorfile.TensorFileError):
                continue
            if head is not None and (head.step, head.attempt) == (step, self._session.attempt) and head.exact:
                return body
        return None
