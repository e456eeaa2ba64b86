"""Which checkpoints may go: a pure function."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """
    The newest `last` good checkpoints (at least one). `every`: beside these, for good, the first one at or after every
    so many steps; of several attempts that passed there, the newest one's. 0 = none.
    """

    last: int = 3
    every: int = 0


def choose_deletions(
    infos: Iterable[CheckpointInfo], keep: Keep, in_use: Collection[CheckpointId]
) -> tuple[CheckpointId, ...]:
    """
    Committed checkpoints to delete, oldest first.

    What `keep` says stays, and whatever is in use. One that is rejected or not finite does not count, and goes once it
    is older than all that stay for being new.
    """
    known = {info.id: info for info in infos}
    good = sorted((i for i, info in known.items() if info.finite and not info.rejected), key=age)
    if not good:
        return ()
    oldest_kept = age(good[-max(keep.last, 1) :][0])
    stays = {*in_use, *_milestones(good, keep.every)}
    return tuple(sorted((i for i in known if age(i) < oldest_kept and i not in stays), key=age))


def _milestones(good: Iterable[CheckpointId], every: int) -> set[CheckpointId]:
    found: dict[int, CheckpointId] = {}
    for checkpoint in good:
        number = checkpoint.step // every if every else 0
        if number and (number not in found or _goes_before(checkpoint, found[number])):
            found[number] = checkpoint
    return set(found.values())


def _goes_before(one: CheckpointId, other: CheckpointId) -> bool:
    return (-one.attempt, one.step) < (-other.attempt, other.step)


def choose_remains(
    uncommitted: Iterable[CheckpointId], committed: Iterable[CheckpointId], in_progress: Collection[CheckpointId]
) -> tuple[CheckpointId, ...]:
    """Folders of saves that never were committed and are older than the newest checkpoint that was."""
    newest = max(map(age, committed), default=(-1, -1))
    return tuple(sorted((i for i in uncommitted if age(i) < newest and i not in in_progress), key=age))
