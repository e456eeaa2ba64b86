"""The layout in force: keeps the exchange going in the background and knows the newest agreed table."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lastwords.protocol import wire
from lastwords.protocol.chunks import Chunk, LayoutError
from lastwords.protocol.control import Word
from lastwords.protocol.pieces import PieceTable
from lastwords.trainer import floors, layouts, restoring
from lastwords.trainer.restoring import Restored
from lastwords.trainer.session import Session

log = logging.getLogger("lastwords")

DECISION_POLL_SECONDS = 0.02


class Agreement:
    """`begin` is called by every rank of the attempt equally often; the n-th calls belong together."""

    def __init__(self, session: Session, prepare: Callable[[PieceTable], None]) -> None:
        self._session = session
        self._prepare = prepare
        self._known = layouts.known_table(session.folder)
        self._proof = _Proof()
        self._elsewhere: frozenset[str] = frozenset()
        self.number = 0
        self._agreed: tuple[int, PieceTable] | None = None
        self._changed = threading.Condition()
        self._closed = False

    def restored(self, restored: Restored) -> None:
        """Before the first `begin`: what the restore leaves to be checked with all ranks."""
        self._elsewhere = restored.elsewhere
        self._proof.wanted = restored.thawed

    def begin(self, layout: Sequence[Chunk]) -> int:
        """The layout of this rank is another one from here on. Returns the number to ask for."""
        with self._changed:
            self.number += 1
        target = threading.Thread(
            target=self._run, args=(self.number, tuple(layout)), name="lastwords-layout", daemon=True
        )
        target.start()
        return self.number

    def table(self, number: int) -> PieceTable | None:
        """The agreed table of exchange `number`, or None while it goes on."""
        agreed = self._agreed
        return agreed[1] if agreed is not None and agreed[0] == number else None

    def wait(self, number: int, timeout_seconds: float) -> PieceTable | None:
        """The table, waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self.table(number) is not None or self._closed, timeout_seconds)
        return self.table(number)

    def needs_proof(self, table: PieceTable) -> bool:
        """Whether the replicas of this table have to be compared at the next snapshot."""
        return len(self._multiple(table)) > 0 and self._proof.missing(table.generation)

    def prove(
        self, table: PieceTable, step: int, digests: dict[str, int], decision: Callable[[int], str | None]
    ) -> None:
        """
        Compare with the other holders, in the background; a difference is a fatal notice.

        Only digests of one step can be compared: what counts is that every rank has a snapshot of `step`, which
        `decision` tells (`Floors.decision`). Otherwise all ranks try again at the next one.
        """
        self._proof.begin(table.generation)
        arguments = (table, step, digests, decision)
        threading.Thread(target=self._prove, args=arguments, name="lastwords-proof", daemon=True).start()

    def close(self) -> None:
        """Give up what still goes on."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()

    @staticmethod
    def _multiple(table: PieceTable) -> list[int]:
        return [piece.holders for piece in table.pieces if piece.holders & (piece.holders - 1)]

    def _run(self, number: int, layout: tuple[Chunk, ...]) -> None:
        session = self._session
        try:
            store = session.store_client()
            table, known = layouts.exchange(
                store, number, session.rank, layout, self._known, session.topology, lambda: self._closed
            )
        except LayoutError as error:
            session.send(wire.RankNotice(code="layout", text=str(error), fatal=True))
            return
        except Exception as error:
            if not self._closed:
                log.warning("lastwords: the layouts could not be exchanged, nothing is snapshotted: %s", error)
            return
        foreign = self._elsewhere - {chunk.name for chunk in table.chunks}
        if foreign:
            text = restoring.other_model(restoring.only_there(foreign))
            session.send(wire.RankNotice(code="wrong-model", text=text, fatal=True))
            return
        if known and not self._proof.wanted:
            self._proof.done = table.generation
        self._elsewhere, self._proof.wanted = frozenset(), False
        self._prepare(table)
        with self._changed:
            # Every rank writes it, before its first part can be READY: a part without its layout is worth nothing.
            # Nobody can agree on a newer one before this rank has begun that exchange, so none is overwritten here.
            if number == self.number:
                layouts.write_table(session.folder, table, session.rank)
        lowest = session.topology.ranks_of(session.topology.worker_of(session.rank))[0]
        self._known = table
        session.put(Word.GENERATION, table.generation)
        if session.rank == lowest:
            session.send(wire.LayoutReady(generation=table.generation))
        with self._changed:
            if self._agreed is None or self._agreed[0] < number:
                self._agreed = (number, table)
            self._changed.notify_all()

    def _prove(
        self, table: PieceTable, step: int, digests: dict[str, int], decision: Callable[[int], str | None]
    ) -> None:
        session, difference = self._session, ""
        try:
            store = session.store_client()
            layouts.publish_digests(store, table, step, session.rank, digests)
            while not self._closed and (decided := decision(step)) is None:
                time.sleep(DECISION_POLL_SECONDS)
            # A floor has been counted by all ranks, and whoever counts has published before.
            if self._closed or decided != floors.FLOOR:
                return
            difference = layouts.compare_digests(store, table, step, session.rank, digests, lambda: self._closed)
            self._proof.done = table.generation
        except Exception as error:
            if not self._closed:
                log.warning("lastwords: the copies of the state could not be compared: %s", error)
        finally:
            self._proof.running = 0
        if difference:
            session.send(wire.RankNotice(code="replicas-differ", text=difference, fatal=True))


class _Proof:
    """Generations whose replicas are compared (`done`) or being compared (`running`)."""

    def __init__(self) -> None:
        self.done = 0
        self.running = 0
        self.wanted = False
        """Even of a table that everybody knew already."""

    def missing(self, generation: int) -> bool:
        return generation not in (self.done, self.running)

    def begin(self, generation: int) -> None:
        self.running = generation
