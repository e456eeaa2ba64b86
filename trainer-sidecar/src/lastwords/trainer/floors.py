"""
Which snapshot step is complete on all ranks, decided once per step in the attempt's store.

Each rank counts its READY part of a step. The last one decides "floor"; a rank that skipped or rejected the step
decides "void" instead, and whoever comes second follows. A rank overwrites neither the floor nor a newer READY part
until that part's step is decided: otherwise two ranks could end up with different steps only. When the store is gone
nothing is decided any more, and the last floor stays.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

FLOOR, VOID = "floor", "void"
_KEEP = 32
_POLL_SECONDS = (0.001, 0.05)


class Floors:
    """Counts in the background; `decision` and `floor` never block."""

    def __init__(self, connect: Callable[[], Any], rank: int, world: int, on_floor: Callable[[int], None]) -> None:
        self._connect = connect
        self._rank = rank
        self._world = world
        self._on_floor = on_floor
        self._tasks: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._decisions: dict[int, str] = {}
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._store: Any = None
        self._recent: list[int] = []
        self.gone = False
        """The store cannot be reached any more."""
        self._thread = threading.Thread(target=self._run, name="lastwords-floors", daemon=True)
        self._thread.start()

    def count(self, step: int) -> None:
        """This rank's part of `step` is READY."""
        with self._changed:
            self._open.add(step)
        self._tasks.put(("count", step))

    def expect(self, step: int) -> None:
        """This rank's part of `step` is READY, and will be counted or voided later."""
        with self._changed:
            self._open.add(step)

    def void(self, step: int) -> None:
        """This rank has no part of `step` and will have none."""
        self._tasks.put(("void", step))

    def decision(self, step: int) -> str | None:
        """ "floor", "void", or None when it is not decided (or was never counted here)."""
        return self._decisions.get(step)

    def is_open(self, step: int) -> bool:
        """Whether this rank's READY part of `step` waits for the others'."""
        return step in self._open

    def wait_change(self, timeout_seconds: float) -> None:
        """Sleep until something is decided."""
        with self._changed:
            self._changed.wait(timeout_seconds)

    def nudge(self) -> None:
        """Wake whoever waits for a change."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread once all counts are in."""
        self._tasks.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        delay = _POLL_SECONDS[0]
        while True:
            try:
                task = self._tasks.get(timeout=delay) if self._open and not self.gone else self._tasks.get()
            except queue.Empty:
                task = ("poll", 0)
            if task is None:
                return
            if self.gone:
                continue
            delay = min(2 * delay, _POLL_SECONDS[1]) if task[0] == "poll" else _POLL_SECONDS[0]
            try:
                self._do(*task)
            except Exception:
                # Rank 0 is dead; so is the attempt, soon.
                self.gone = True
                with self._changed:
                    self._changed.notify_all()

    def _do(self, task: str, step: int) -> None:
        if self._store is None:
            self._store = self._connect()
        if task == "count":
            if self._store.add(_key(step, "count"), 1) == self._world:
                self._decide(step, FLOOR)
            if self._rank == 0:
                self._forget(step)
        elif task == "void":
            self._decide(step, VOID)
        for step_ in sorted(self._open):
            if self._store.check([_key(step_, "decision")]):
                self._learn(step_, self._store.get(_key(step_, "decision")).decode())

    def _decide(self, step: int, wanted: str) -> None:
        self._learn(step, self._store.compare_set(_key(step, "decision"), "", wanted).decode())

    def _learn(self, step: int, decision: str) -> None:
        with self._changed:
            self._open.discard(step)
            self._decisions[step] = decision
            for old in [known for known in self._decisions if known < step - 4 * _KEEP]:
                del self._decisions[old]
            if decision == FLOOR:
                self._on_floor(step)
            self._changed.notify_all()

    def _forget(self, step: int) -> None:
        """Old keys: everybody has looked at them long ago, since nobody can have more steps open than slots."""
        self._recent.append(step)
        while len(self._recent) > _KEEP:
            old = self._recent.pop(0)
            for kind in ("count", "decision"):
                self._store.delete_key(_key(old, kind))


def _key(step: int, kind: str) -> str:
    return f"lastwords/snap/{step}/{kind}"
