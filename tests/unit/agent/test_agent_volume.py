"""Reading the memory volume: what is torn, foreign, cut short or provisional without worth counts for nothing."""

from __future__ import annotations

import os
import pathlib

from lastwords.agent.volume import Volume
from lastwords.protocol import areas, volume
from lastwords.protocol.pieces import Topology
from tests.processes.agent import harness

ONE = Topology(workers=1, processes_per_worker=2)
RANKS = range(2)


def made(folder: pathlib.Path) -> tuple[harness.Volume, Volume]:
    return harness.Volume(folder, harness.make_table(ONE)), Volume(str(folder), 2)


def test_an_empty_volume_holds_nothing(tmp_path: pathlib.Path) -> None:
    _, agent = made(tmp_path)
    assert agent.block(0) is None
    assert agent.table() is None
    assert agent.holdings(RANKS) == ()
    assert agent.record_holdings(RANKS) == ()


def test_a_part_counts_only_between_its_commits(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_part(0, 1, 5, 2)
    part = agent.find_part(1, 5, 2)
    assert part is not None
    assert agent.unchanged(part)
    assert agent.bad_block(part) is None
    assert agent.find_part(0, 5, 2) is None
    area = writer._map(volume.part_commit(0, 1), volume.COMMIT_AREA_BYTES)
    areas.invalidate(area)
    assert agent.holdings(RANKS) == ()
    assert not agent.unchanged(part)
    writer.write_part(0, 1, 6, 2)
    assert agent.find_part(1, 6, 2) is not None
    assert not agent.unchanged(part)


def test_a_foreign_or_torn_commit_area_is_no_part(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_part(0, 0, 5, 2)
    area = writer._map(volume.part_commit(1, 0), volume.COMMIT_AREA_BYTES)
    body = areas.read(writer._map(volume.part_commit(0, 0), volume.COMMIT_AREA_BYTES))
    assert body is not None
    areas.commit(area, body.replace(b'"rank":0', b'"rank":1'))
    assert agent.part(1, 0) is None, "it says that it is another rank's"
    areas.commit(area, b"not json")
    assert agent.part(1, 0) is None
    (tmp_path / volume.part_commit(0, 0)).write_bytes(b"\2")
    assert agent.part(0, 0) is None


def test_a_part_that_is_cut_short_is_a_bad_block_and_no_end_of_the_agent(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_part(0, 0, 5, 2)
    part = agent.find_part(0, 5, 2)
    assert part is not None
    os.truncate(tmp_path / volume.part(0, 0), 10)
    assert agent.bad_block(part) == 0
    agent.discard(part)
    assert agent.part(0, 0) is None


def test_final_records_come_before_provisional_ones_and_inexact_ones_do_not_count(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_record(0, 3, 1)
    writer.write_record(0, 4, 1, provisional=True)
    writer.write_record(1, 4, 1, provisional=True, exact=False)
    held = {(r.rank, r.step, r.provisional) for r in agent.record_holdings(RANKS)}
    assert held == {(0, 3, False), (0, 4, True)}
    writer.write_record(0, 4, 1)
    held = {(r.rank, r.step, r.provisional) for r in agent.record_holdings(RANKS)}
    assert held == {(0, 3, False), (0, 4, False)}


def test_the_record_of_a_slot_lives_as_long_as_its_part(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_part(0, 0, 5, 1)
    for step in (8, 9):
        writer.write_record(0, step, 1)
    assert agent.find_record(RANKS, 0, 5, 1) is not None
    part = agent.find_part(0, 5, 1)
    assert part is not None
    agent.discard(part)
    assert agent.find_record(RANKS, 0, 5, 1) is None


def test_records_that_outgrew_their_file_are_found_in_the_new_one(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    writer.write_record(0, 3, 1)
    assert len(agent.record_holdings(RANKS)) == 1
    os.rename(tmp_path / volume.records(0), tmp_path / "old")
    writer.write_record(0, 4, 1)
    assert [r.step for r in agent.record_holdings(RANKS)] == [4]


def test_a_neighbours_record_is_kept_for_two_steps_and_a_final_own_one_is_no_neighbours(tmp_path: pathlib.Path) -> None:
    _, agent = made(tmp_path)
    for step in (1, 2, 3):
        assert agent.keep_neighbour(harness.record_bytes(5, step, 1))
    assert not agent.keep_neighbour(b"junk")
    again = Volume(str(tmp_path), 2)
    for found in (agent, again):
        assert {(r.rank, r.step, r.neighbour) for r in found.record_holdings(RANKS)} == {(5, 2, True), (5, 3, True)}


def test_pins_are_words_of_their_slot_and_rank(tmp_path: pathlib.Path) -> None:
    writer, agent = made(tmp_path)
    agent.pin(1, 0, 2, 8)
    assert writer.pins() == [0, 0, 8, 0]
    agent.unpin_all(2)
    assert writer.pins() == [0, 0, 0, 0]
