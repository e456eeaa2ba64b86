"""The control block and the snapshot plan."""

from __future__ import annotations

import pytest

from lastwords.protocol import control
from lastwords.protocol.control import Word
from lastwords.protocol.snapshots import SnapshotPlan


def test_a_new_attempt_begins_with_zeroes_and_a_phase() -> None:
    block = memoryview(bytearray(control.BLOCK_BYTES))
    assert not control.is_valid(block)
    control.initialise(block, rank=3, attempt=2, pid=77)
    control.put(block, Word.STEP, 5)
    control.initialise(block, rank=3, attempt=3, pid=78)
    assert control.is_valid(block)
    assert [control.get(block, word) for word in (Word.RANK, Word.ATTEMPT, Word.PID, Word.STEP)] == [3, 3, 78, 0]
    assert control.get_phase(block) == control.Phase("startup")


def test_a_phase_that_cannot_be_read_is_none_so_that_the_longest_deadline_applies() -> None:
    block = memoryview(bytearray(control.BLOCK_BYTES))
    control.initialise(block, rank=0, attempt=1, pid=1)
    control.set_phase(block, control.Phase("evaluate", 30.0))
    assert control.get_phase(block) == control.Phase("evaluate", 30.0)
    block[2048 + 40] ^= 1
    assert control.get_phase(block) is None


@pytest.mark.parametrize(
    ("plan", "snapshots", "persists"),
    [
        (SnapshotPlan(every_steps=3, persist_every=2, from_step=3), [3, 6, 9, 12], [3, 9]),
        (SnapshotPlan(every_steps=1, persist_every=0, from_step=10), [10, 11, 12], []),
        (SnapshotPlan(every_steps=5, persist_every=1, from_step=0), [5, 10], [5, 10]),
        (SnapshotPlan(every_steps=100, from_step=100, stop_after=7), [7], [7]),
    ],
)
def test_a_plan_says_which_steps(plan: SnapshotPlan, snapshots: list[int], persists: list[int]) -> None:
    assert [step for step in range(13) if plan.snapshots(step)] == snapshots
    assert [step for step in range(13) if plan.persists(step)] == persists
