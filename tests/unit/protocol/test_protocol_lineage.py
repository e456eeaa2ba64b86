"""Which states are on the path that the job went, and which were left behind."""

from __future__ import annotations

import pytest

from lastwords.protocol.lineage import LineageEntry, is_valid_source

# attempt 1 ran to 100; 2 went on from 90; 3 failed at once; 4 went on from 95 of attempt 2
LINEAGE = (LineageEntry(1, 0, 0), LineageEntry(2, 90, 1), LineageEntry(3, 95, 2), LineageEntry(4, 95, 2))


@pytest.mark.parametrize(
    ("step", "attempt", "valid"),
    [
        (95, 4, True),
        (200, 4, True),
        (94, 4, False),
        (95, 2, True),
        (90, 2, True),
        (96, 2, False),
        (89, 2, False),
        (90, 1, True),
        (10, 1, True),
        (91, 1, False),
        (95, 3, False),
        (5, 9, False),
    ],
)
def test_a_state_is_a_source_only_on_the_current_path(step: int, attempt: int, valid: bool) -> None:
    assert is_valid_source(LINEAGE, step, attempt) is valid


def test_without_a_lineage_nothing_is_a_source() -> None:
    assert not is_valid_source((), 0, 1)


def test_a_bounded_lineage_still_knows_what_its_oldest_entry_started_from() -> None:
    assert is_valid_source(LINEAGE[3:], 95, 2)
    assert not is_valid_source(LINEAGE[3:], 96, 2)
    assert not is_valid_source(LINEAGE[3:], 10, 1)
