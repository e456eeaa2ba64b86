"""
Storage of a real agent that misbehaves as a file says: "slow", "stalled", "full", "read-only", "stale", "other", or
nothing. Python imports the folder's `sitecustomize` at its start; in any process but an agent it does nothing.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

SWITCH = "LASTWORDS_TEST_STORAGE"
METADATA_SECONDS = 4.0
"""Instead of half a minute, so that a stalled storage is told within the patience of a test."""


class Switch:
    """The test's side. `variables` go to `lastwords run`."""

    def __init__(self, folder: pathlib.Path, root: pathlib.Path) -> None:
        self._file = folder / "storage-does"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(
            "from tests.processes.storage import bad_storage\n\nbad_storage.install()\n"
        )
        self.variables = {SWITCH: str(self._file), "PYTHONPATH": f"{folder / 'site'}:{root}"}
        self.set("")

    def set(self, what: str) -> None:
        """From the next call on."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(what)
        fresh.replace(self._file)


def install() -> None:
    """In an agent: put the misbehaving store around the real one."""
    if SWITCH not in os.environ or "lastwords.agent" not in sys.orig_argv:
        return
    from lastwords.agent import persist
    from lastwords.storage import places
    from lastwords.storage.base import Kind, StorageError, Store
    from lastwords.storage.faulty import FaultyStore

    persist.METADATA_SECONDS = METADATA_SECONDS
    real, switch = places.open_store, pathlib.Path(os.environ[SWITCH])
    kinds: dict[str, Kind] = {"read-only": "read-only", "other": "other"}

    class BadStore(FaultyStore):
        def _begin(self, what: str, path: str, *, changes: bool = False) -> None:
            while (now := switch.read_text()) == "stalled":
                time.sleep(0.02)
            if now == "slow":
                time.sleep(0.1)
            if now == "stale":
                raise StorageError(f"{what} {path}: stale handle", "stale")
            self.full_after = 100 if now == "full" else None
            self.failing = kinds.get(now)
            super()._begin(what, path, changes=changes)

    def open_store(where: str) -> Store:
        return BadStore(real(where))

    places.open_store = open_store
