"""
The journal: what was known when each attempt's starting point was chosen, for a second opinion in tests.

Written only when LASTWORDS_JOURNAL names a file; one line of JSON per attempt. Not a log for people.
"""

from __future__ import annotations

import os
import pathlib

from lastwords.protocol import codec
from lastwords_operator.core.observation import Decision, Observation
from lastwords_operator.local.folder import append_line

VARIABLE = "LASTWORDS_JOURNAL"


class Journal:
    """Appends a line whenever a decision begins an attempt."""

    def __init__(self) -> None:
        name = os.environ.get(VARIABLE)
        self._path = pathlib.Path(name) if name else None

    def note(self, seen: Observation, decision: Decision) -> None:
        """Called with each applied decision."""
        if self._path is None or decision.status.attempt == seen.status.attempt:
            return
        row = {
            "at": seen.now,
            "attempt": decision.status.attempt,
            "plan": codec.to_plain(decision.status.restore),
            "lineage": codec.to_plain(seen.status.lineage),
            "excluded": codec.to_plain(seen.status.excluded),
            "reports": [codec.to_plain(report) for _, report in sorted(seen.reports().items())],
        }
        append_line(self._path, row)
