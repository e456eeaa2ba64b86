"""Commit areas: whole or recognised as torn, whatever the writer's death leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.protocol import areas


def fresh(capacity: int = 256) -> memoryview:
    return memoryview(bytearray(capacity))


def test_an_area_that_was_never_written_is_empty() -> None:
    assert areas.read(fresh()) is None


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_the_last_committed_body_is_read(bodies: list[bytes]) -> None:
    area = fresh()
    for body in bodies:
        areas.commit(area, body)
    assert areas.read(area) == bodies[-1]
    assert areas.sequence(area) == 2 * len(bodies)


def test_an_invalidated_area_is_refused_until_the_next_commit() -> None:
    area = fresh()
    areas.commit(area, b"old")
    areas.invalidate(area)
    assert areas.read(area) is None
    areas.invalidate(area)
    assert areas.read(area) is None
    areas.commit(area, b"new")
    assert areas.read(area) == b"new"


def test_revalidate_takes_back_an_invalidate_and_still_changes_the_sequence() -> None:
    area = fresh()
    areas.commit(area, b"body")
    before = areas.sequence(area)
    areas.invalidate(area)
    areas.revalidate(area)
    assert areas.read(area) == b"body"
    assert areas.sequence(area) > before


@given(st.binary(min_size=1, max_size=64), st.data())
def test_every_flipped_bit_of_length_checksum_or_body_is_noticed(body: bytes, data: st.DataObject) -> None:
    area = fresh()
    areas.commit(area, body)
    # bytes 8..24 are length and checksum; 24..32 are unused
    position = data.draw(st.sampled_from([*range(8, 24), *range(32, 32 + len(body))]))
    area[position] ^= 1 << data.draw(st.integers(0, 7))
    assert areas.read(area) is None


def test_a_body_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(areas.AreaFullError, match="300 bytes do not fit into an area of 224"):
        areas.commit(fresh(), b"x" * 300)
