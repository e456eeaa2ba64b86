"""
The gate before an update: where a held rank waits, and the update counter that says whether the state is whole.

The counter is odd from the first optimizer step after a boundary until the next boundary. Counter and hold flag
change under one lock, so that whoever has seen "held" and "even" knows that no update begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lastwords.protocol import control, wire
from lastwords.protocol.control import Word
from lastwords.trainer import faultpoints


class Gate:
    """One per process; it exists before the Checkpointer does, so that a hold is never lost."""

    def __init__(self, block: memoryview, tell: Callable[[wire.HoldState], None]) -> None:
        self._block = block
        self._tell = tell
        self._changed = threading.Condition()
        self._hold = 0
        self._held = False
        self._release_to: int | None = None
        self.dying = False
        """Set when the script ended with an exception: nothing waits at the gate any more."""

    # -- asked by the session thread --------------------------------------------------------------

    def hold(self, order: wire.Hold) -> None:
        """Close the gate, or allow updates up to `release_to`; answers with the state."""
        with self._changed:
            if order.hold < self._hold:
                return
            self._hold = order.hold
            self._held = True
            self._release_to = order.release_to
            control.put(self._block, Word.HOLD, 1)
            self._changed.notify_all()
        self.tell()

    def release(self, order: wire.Release) -> None:
        """Open the gate when no newer hold is in force."""
        with self._changed:
            if order.hold < self._hold:
                return
            self._held = False
            control.put(self._block, Word.HOLD, 0)
            self._changed.notify_all()

    def tell(self) -> None:
        """Send the state if held."""
        with self._changed:
            state = self.state() if self._held else None
        if state is not None:
            self._tell(state)

    @property
    def held(self) -> bool:
        """Whether a hold is in force."""
        return self._held

    def state(self) -> wire.HoldState:
        """Answer to a hold."""
        return wire.HoldState(
            hold=self._hold,
            step=max(control.get(self._block, Word.STEP) - 1, 0),
            odd=self.odd,
            at_gate=bool(control.get(self._block, Word.AT_GATE)),
        )

    # -- the state --------------------------------------------------------------------------------

    @property
    def odd(self) -> bool:
        """Whether an update has begun and its boundary is not passed."""
        return bool(control.get(self._block, Word.UPDATE_COUNTER) & 1)

    @property
    def counter(self) -> int:
        """The update counter."""
        return control.get(self._block, Word.UPDATE_COUNTER)

    # -- called by the main thread ----------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Wait while held, then make the counter odd. `step` is the number of boundaries passed."""
        with self._changed:
            self._wait_while_held(step)
            faultpoints.begin("update")
            control.put(self._block, Word.UPDATE_COUNTER, control.get(self._block, Word.UPDATE_COUNTER) | 1)
        self.tell()

    def before_boundary(self, step: int) -> None:
        """A step without an update has no pre-hook to stop it: it stops here, before its boundary."""
        if self._held:
            with self._changed:
                if not self.odd:
                    self._wait_while_held(step)

    def pass_boundary(self, step: int) -> None:
        """Write STEP, then the even counter: a reader that sees `even` sees the step that belongs to it."""
        with self._changed:
            was_odd = self.odd
            control.put(self._block, Word.STEP, step + 1)
            if was_odd:
                control.put(self._block, Word.UPDATE_COUNTER, control.get(self._block, Word.UPDATE_COUNTER) + 1)
                faultpoints.end("update")
        self.tell()

    def _wait_while_held(self, step: int) -> None:
        if not self._closed_for(step):
            return
        control.put(self._block, Word.AT_GATE, 1)
        state = self.state()
        self._changed.release()
        try:
            self._tell(state)
        finally:
            self._changed.acquire()
        while self._closed_for(step):
            self._changed.wait()
        control.put(self._block, Word.AT_GATE, 0)
        # Waiting at the gate is not the script's own time: the hang deadline starts anew.
        control.put(self._block, Word.BOUNDARY_NS, time.monotonic_ns())

    def _closed_for(self, step: int) -> bool:
        return self._held and not self.dying and (self._release_to is None or step >= self._release_to)
