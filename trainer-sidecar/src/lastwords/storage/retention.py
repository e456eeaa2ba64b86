"""Which checkpoints may go: a pure function."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import CheckpointInfo


def age(checkpoint: CheckpointId) -> tuple[int, int]:
    """
    Sorts oldest first: by attempt, then by step, both as numbers.

    By attempt first, since an attempt that was restored from step 50 makes a step 60 that is newer, and worth more,
    than the step 100 of an attempt that was given up.
    """
    return checkpoint.attempt, checkpoint.step


def choose_deletions(
    infos: Iterable[CheckpointInfo], keep_last: int, in_use: Collection[CheckpointId]
) -> tuple[CheckpointId, ...]:
    """
    Committed checkpoints to delete, oldest first.

    The newest `keep_last` good ones stay (at least one), and whatever is in use. One that is rejected or not finite
    does not count, and goes once it is older than all that stay for their own sake.
    """
    known = {info.id: info for info in infos}
    good = sorted((i for i, info in known.items() if info.finite and not info.rejected), key=age)
    if not good:
        return ()
    oldest_kept = age(good[-max(keep_last, 1) :][0])
    return tuple(sorted((i for i in known if age(i) < oldest_kept and i not in in_use), key=age))


def choose_remains(
    uncommitted: Iterable[CheckpointId], committed: Iterable[CheckpointId], in_progress: Collection[CheckpointId]
) -> tuple[CheckpointId, ...]:
    """Folders of saves that never were committed and are older than the newest checkpoint that was."""
    newest = max(map(age, committed), default=(-1, -1))
    return tuple(sorted((i for i in uncommitted if age(i) < newest and i not in in_progress), key=age))
