"""Which attempt went on from which step of which attempt, and what that makes a valid source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LineageEntry:
    """Attempt `attempt` started from `step` of `parent` (0 and 0: from the beginning)."""

    attempt: int
    step: int
    parent: int


def is_valid_source(lineage: Sequence[LineageEntry], step: int, attempt: int) -> bool:
    """
    Whether the state (step, attempt) lies on the path that leads to the newest entry of `lineage`.

    The newest attempt's own steps count from the step it restored; an ancestor's only up to the step at
    which its child left it. An attempt that restored step s also *has* s, under the parent's number.
    """
    by_attempt = {entry.attempt: entry for entry in lineage}
    if not lineage:
        return False
    current = max(by_attempt)
    limit: int | None = None
    while current in by_attempt:
        entry = by_attempt[current]
        if attempt == current:
            return step >= entry.step and (limit is None or step <= limit)
        limit = entry.step if limit is None else min(limit, entry.step)
        current = entry.parent
    # Older than the bounded list: only what the list's oldest entry started from can be judged.
    oldest = min(by_attempt.values(), key=lambda entry: entry.attempt)
    return oldest.parent == attempt and step <= oldest.step and (limit is None or step <= limit)
