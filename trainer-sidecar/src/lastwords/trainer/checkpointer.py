"""The two lines in a user's script."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lastwords.protocol import environment, wire
from lastwords.trainer import parts as parts_
from lastwords.trainer import session as session_
from lastwords.trainer.collect import Collector
from lastwords.trainer.parts import StateError
from lastwords.trainer.protected import Protected, mode_of
from lastwords.trainer.unprotected import Unprotected

if TYPE_CHECKING:
    from lastwords.trainer.session import Session
    from lastwords.trainer.standalone import Standalone


class Checkpointer:
    """
    Keeps a training run: restores it, numbers its steps, and marks the boundary after each.

        checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        for step in checkpointer.steps(total_steps):
            train_one_step(step)

    Parts are keyword arguments of any name: modules (also wrapped in DistributedDataParallel), optimizers,
    schedulers, gradient scalers, a DataLoader, any object with `state_dict` and `load_state_dict`, and lists of those.
    Names belong to the saved state: keep them from run to run.

    `mode`: "overlap" (default: the copy runs beside the next forward and backward, and the optimizer waits for it),
    "manual" (the script calls `wait()` before its update) or "blocking".
    `storage`: folder for a script that runs under plain python or torchrun (else LASTWORDS_STORAGE).

    Raises StateError for what cannot be saved; `restore` raises WrongModelError for another model's state.
    """

    def __init__(self, *, mode: str | None = None, storage: str | None = None, **parts: Any) -> None:
        chosen = mode_of(mode)
        session = session_.current() or _attached()
        try:
            self._parts = parts_.sort(parts)
            collector = Collector(self._parts)
        except StateError as error:
            if session is not None:
                session.send(wire.RankNotice(code="state", text=str(error), fatal=True))
            raise
        folder = storage or os.environ.get(environment.STORAGE)
        self._work: Protected | Standalone | Unprotected
        if session is not None:
            self._work = Protected(session, self._parts, collector, chosen)
        elif folder:
            # Imported only here: under a runner the agent does the storing.
            from lastwords.trainer.standalone import Standalone

            self._work = Standalone(folder, self._parts, collector)
        else:
            self._work = Unprotected()
        self.restored_step: int | None = None
        """The step that `restore` found; None before it."""

    # -- the loop ---------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """
        Restore, then give the number of each step from there to `total`, marking the boundary after each.

        Ends early when a stop was asked for (see `should_stop`).
        """
        step = self.restore() if self.restored_step is None else self._work.step
        while step < total and not self._work.should_stop:
            yield step
            step += 1
            # A script may have marked this boundary itself, in front of an evaluation.
            if self._work.step < step:
                self._work.step_done(last=step >= total)
        self._work.finish()

    def restore(self) -> int:
        """Bring everything to the newest kept state; returns its step (0: the beginning)."""
        self.restored_step = self._work.restore()
        return self.restored_step

    def step_done(self, loss: float | None = None) -> None:
        """The step is over: all optimizers, scheduler and averages are done."""
        if self.restored_step is None:
            raise RuntimeError("step_done() before restore(): call restore() once, before the first step")
        if loss is not None:
            self.report(loss=loss)
        self._work.step_done()

    def wait(self) -> None:
        """In manual mode: call it right before the update. Waits until the newest snapshot has been copied."""
        self._work.wait()

    def save(self) -> None:
        """Also save the state of this boundary (the last one, or the next while an update goes on). On all ranks."""
        self._work.save()

    @property
    def should_stop(self) -> bool:
        """True when the job is to stop after the step just done; `steps()` sees to it by itself."""
        return self._work.should_stop

    @property
    def step(self) -> int:
        """Boundaries passed."""
        return self._work.step

    # -- what the script says about itself --------------------------------------------------------

    def report(self, *, loss: float) -> None:
        """Show the loss in status and view."""
        self._work.report(float(loss))

    @contextlib.contextmanager
    def phase(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Inside, this rank does `name` (such as "evaluate") and counts as hanging only after `timeout` seconds."""
        self._work.set_phase(name, timeout)
        try:
            yield
        finally:
            self._work.end_phase()

    @property
    def loader(self) -> Any:
        """The DataLoader that was given: it goes on in the middle of an epoch after a restore."""
        given = self._parts.given
        names = [name for name in given if name in self._parts.loaders]
        for name in ("loader", *names):
            if name in given:
                return given[name]
        raise AttributeError("no loader was given to the Checkpointer")


def _attached() -> Session | None:
    """The session of a rank below a wrapped command, which no runner has made."""
    if environment.WRAPPED not in os.environ:
        return None
    from lastwords.trainer import attached

    return attached.attach()
