"""The Checkpointer under plain python or torchrun without storage: the loop runs, nothing is kept."""

from __future__ import annotations

import os
import sys

from lastwords.protocol import environment


class Unprotected:
    """Counts steps."""

    def __init__(self) -> None:
        self.step = 0
        self.should_stop = False
        if os.environ.get("RANK", "0") == "0":
            print(
                "lastwords: nothing protects this run. Start it with `lastwords run -- python …` to survive faults, "
                f"or set {environment.STORAGE} to a folder to save and restore in its own process.",
                file=sys.stderr,
                flush=True,
            )

    def restore(self) -> int:
        """There is nothing to restore."""
        return 0

    def step_done(self, *, last: bool = False) -> None:
        """Count."""
        self.step += 1

    def wait(self) -> None:
        """Nothing is copied."""

    def save(self) -> None:
        """Nothing is saved."""

    def finish(self) -> None:
        """The loop is over."""

    def set_phase(self, name: str, timeout_seconds: float | None) -> None:
        """Nobody watches."""

    def end_phase(self) -> None:
        """Nobody watches."""

    def report(self, loss: float) -> None:
        """Nobody watches."""
