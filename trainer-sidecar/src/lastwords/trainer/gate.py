"""
The gate before an update: where a held rank waits, and the update counter that says whether the state is whole.

The counter is odd from the first optimizer step after a boundary until the next boundary. Counter and hold flag
change under one lock, so that whoever has seen "held" and "even" knows that no update begins.

Python may be ahead of an accelerator. What the control block says, and what everybody else goes by, is in the device's
order: step and counter are written when the device has come to where Python changed them.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

from lastwords.protocol import control, wire
from lastwords.protocol.control import Word
from lastwords.trainer import faultpoints
from lastwords.trainer.device import Cpu, Device, Mark

WATCH_SECONDS = 0.001
"""How often an accelerator is asked how far it has come."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """What holds once the device has reached the mark."""

    mark: Mark
    counter: int
    step: int | None = None
    """None: an update begins."""


class Gate:
    """One per process; it exists before the Checkpointer does, so that a hold is never lost."""

    def __init__(self, block: memoryview, tell: Callable[[wire.HoldState], None]) -> None:
        self._block = block
        self._tell = tell
        self._changed = threading.Condition()
        self._hold = 0
        self._held = False
        self._release_to: int | None = None
        self.device: Device = Cpu()
        self._ordered_counter = control.get(block, Word.UPDATE_COUNTER)
        self._coming: collections.deque[_Change] = collections.deque()
        self._untold = False
        """Whoever asked has seen the device come further, and the agent has not heard of it."""
        self.dying = False
        """Set when the script ended with an exception: nothing waits at the gate any more."""

    def on_device(self, device: Device) -> None:
        """Say where the state lives, before the first step."""
        self.device = device
        if device.asynchronous:
            threading.Thread(target=self._watch, name="lastwords-device", daemon=True).start()

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
        with self._changed:
            self._observe()
            return wire.HoldState(
                hold=self._hold,
                step=max(control.get(self._block, Word.STEP) - 1, 0),
                odd=bool(control.get(self._block, Word.UPDATE_COUNTER) & 1),
                at_gate=bool(control.get(self._block, Word.AT_GATE)),
            )

    # -- the state --------------------------------------------------------------------------------

    @property
    def odd(self) -> bool:
        """Whether an update has begun on the device and its boundary is not passed there."""
        return bool(self.counter & 1)

    @property
    def counter(self) -> int:
        """The update counter, in the device's order."""
        with self._changed:
            self._observe()
            return control.get(self._block, Word.UPDATE_COUNTER)

    @property
    def ordered_counter(self) -> int:
        """The update counter in Python's order: what the device will come to."""
        return self._ordered_counter

    @property
    def updating(self) -> bool:
        """Whether Python is between the begin of an update and its boundary."""
        return bool(self._ordered_counter & 1)

    def _order(self, step: int | None = None) -> None:
        self._coming.append(_Change(self.device.mark(), self._ordered_counter, step))
        self._observe()
        self._changed.notify_all()

    def _observe(self) -> bool:
        """Write what the device has come to. With the lock held. Returns whether anything changed."""
        changed = False
        while self._coming and self._coming[0].mark.reached():
            change = self._coming.popleft()
            if change.step is not None:
                # STEP, then the even counter: a reader that sees "even" sees the step that belongs to it.
                control.put(self._block, Word.STEP, change.step + 1)
            control.put(self._block, Word.UPDATE_COUNTER, change.counter)
            changed = self._untold = True
        if changed:
            self._changed.notify_all()
        return changed

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not (self._coming or self._untold):
                    self._changed.wait()
                self._observe()
                untold, self._untold = self._untold, False
            if untold:
                self.tell()
            time.sleep(WATCH_SECONDS)

    # -- called by the main thread ----------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Wait while held, then make the counter odd. `step` is the number of boundaries passed."""
        with self._changed:
            self._wait_while_held(step)
            faultpoints.begin("update")
            self._ordered_counter |= 1
            self._order()
        self.tell()

    def before_boundary(self, step: int) -> None:
        """A step without an update has no pre-hook to stop it: it stops here, before its boundary."""
        if self._held:
            with self._changed:
                if not self.updating:
                    self._wait_while_held(step)

    def let_device_come_to(self, step: int) -> None:
        """
        Wait until the device has come to the boundary of `step`.

        Records of two steps are kept: Python may be one boundary ahead of the device, not more.
        """
        with self._changed:
            while control.get(self._block, Word.STEP) <= step and not self.dying:
                if not self._observe():
                    self._changed.wait(WATCH_SECONDS)

    def pass_boundary(self, step: int) -> None:
        """The state is that of `step`, once the device is through."""
        with self._changed:
            if self.updating:
                self._ordered_counter += 1
                faultpoints.end("update")
            self._order(step)
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
