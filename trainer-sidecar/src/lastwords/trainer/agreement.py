"""The layout in force: keeps the exchange going in the background and knows the newest agreed table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from lastwords.protocol import wire
from lastwords.protocol.chunks import Chunk, LayoutError
from lastwords.protocol.control import Word
from lastwords.protocol.pieces import PieceTable
from lastwords.trainer import layouts
from lastwords.trainer.session import Session

log = logging.getLogger("lastwords")


class Agreement:
    """`begin` is called by every rank of the attempt equally often; the n-th calls belong together."""

    def __init__(self, session: Session, prepare: Callable[[PieceTable], None]) -> None:
        self._session = session
        self._prepare = prepare
        self._known = layouts.known_table(session.folder)
        self._proven = self._known.generation if self._known else 0
        self.number = 0
        self._agreed: tuple[int, PieceTable] | None = None
        self._changed = threading.Condition()
        self._closed = False

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
        """Whether the replicas of this table have not been compared yet."""
        return len(self._multiple(table)) > 0 and table.generation != self._proven

    def prove(self, table: PieceTable, digests: dict[str, int]) -> None:
        """Compare with the other holders, in the background; a difference is a fatal notice."""
        self._proven = table.generation
        threading.Thread(target=self._prove, args=(table, digests), name="lastwords-proof", daemon=True).start()

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
            table = layouts.exchange(
                store, number, session.rank, layout, self._known, session.topology, lambda: self._closed
            )
        except LayoutError as error:
            session.send(wire.RankNotice(code="layout", text=str(error), fatal=True))
            return
        except Exception as error:
            if not self._closed:
                log.warning("lastwords: the layouts could not be exchanged, nothing is snapshotted: %s", error)
            return
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

    def _prove(self, table: PieceTable, digests: dict[str, int]) -> None:
        session = self._session
        try:
            store = session.store_client()
            layouts.publish_digests(store, table, session.rank, digests)
            difference = layouts.compare_digests(store, table, session.rank, digests, lambda: self._closed)
        except Exception as error:
            if not self._closed:
                log.warning("lastwords: the copies of the state could not be compared: %s", error)
            return
        if difference:
            session.send(wire.RankNotice(code="replicas-differ", text=difference, fatal=True))
