"""What survivors cover, against brute force over all sets of them; and who copies and serves what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.protocol import chunks as chunks_
from lastwords.protocol import pieces
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords_operator.core import coverage
from tests.unit.core import layouts

TOPOLOGIES = [Topology(workers=1, processes_per_worker=8), Topology(workers=2, processes_per_worker=4),
              Topology(workers=4, processes_per_worker=2), Topology(workers=8, processes_per_worker=1)]  # fmt: skip
CASES = [
    pytest.param(name, topology, id=f"{name}-{topology.workers}workers")
    for name in layouts.LAYOUTS for topology in TOPOLOGIES
]  # fmt: skip


def _cells(chunk: Chunk) -> set[tuple[str, tuple[int, ...]]]:
    ranges = [range(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
    return {(chunk.name, point) for point in itertools.product(*ranges)}


def _whole(table: PieceTable) -> set[tuple[str, tuple[int, ...]]]:
    return set().union(*(_cells(chunk) for chunk in table.chunks))


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_live_coverage_agrees_with_the_elements_that_survivors_hold(name: str, topology: Topology) -> None:
    """For each of the 256 sets of survivors: covered exactly when every element of every tensor is held."""
    table = layouts.table(name, topology)
    summary, whole = pieces.summarise(table), _whole(table)
    held = {rank: set().union(*map(_cells, layouts.LAYOUTS[name](rank))) for rank in range(8)}
    for survivors in range(256):
        ranks = pieces.bits(survivors)
        truth = set().union(*(held[rank] for rank in ranks)) == whole
        assert coverage.recoverable(summary, live=ranks) == truth


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_parts_cover_exactly_when_no_chunk_is_missing(name: str, topology: Topology) -> None:
    """
    The bitmask query agrees with the assignment of real chunks, for each set of ready parts. Shares that got no chunk
    (fewer chunks than holders) are needed by the query, which does not know of them, and by nobody else.
    """
    table = layouts.table(name, topology)
    summary = pieces.summarise(table)
    empty = pieces.mask(bit for bit, ids in enumerate(pieces.share_chunks(table)) if not ids)
    for ready in range(256):
        parts = pieces.bits(ready)
        written = pieces.assign_writes(table, parts)
        covered = coverage.covered(summary, parts=parts)
        assert (covered | empty == coverage.masks(summary).full) == (not written.missing)
        assert not (coverage.recoverable(summary, parts=parts) and written.missing)
        every = sorted(chunk for ids in written.writes.values() for chunk in ids)
        assert len(every) == len(set(every))
        assert sorted([*every, *written.missing]) == list(range(len(table.chunks)))


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_a_live_copy_leaves_nothing_out_that_survivors_could_copy(name: str, topology: Topology) -> None:
    """Every part that some survivor of its worker holds is copied, by one of its worker, and bytes are balanced."""
    summary = pieces.summarise(layouts.table(name, topology))
    known = coverage.masks(summary)
    for survivors in range(256):
        ranks = pieces.bits(survivors)
        writers = coverage.copy_writers(summary, ranks, ())
        for part in range(8):
            able = [
                rank for rank in ranks
                if topology.worker_of(rank) == topology.worker_of(part) and not known.parts[part] & ~known.live[rank]
            ]  # fmt: skip
            if able and known.parts[part]:
                assert writers[part] in able
            else:
                assert part not in writers


def test_a_live_copy_of_ddp_is_balanced_over_the_survivors() -> None:
    """Eight parts, three survivors: nobody copies more than one part more than another."""
    summary = pieces.summarise(layouts.table("DDP8", TOPOLOGIES[0]))
    for survivors in range(1, 256):
        ranks = pieces.bits(survivors)
        load = dict.fromkeys(ranks, 0)
        for writer in coverage.copy_writers(summary, ranks, ()).values():
            load[writer] += 1
        assert max(load.values()) - min(load.values()) <= 1
        assert sum(load.values()) == sum(1 for mask in coverage.masks(summary).parts if mask)


def test_ready_parts_are_not_copied_again() -> None:
    """Only what is missing is copied."""
    summary = pieces.summarise(layouts.table("DDP8", TOPOLOGIES[1]))
    assert set(coverage.copy_writers(summary, range(8), (0, 1, 2, 3, 4))) <= {5, 6, 7}


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_sources_of_parts_come_from_workers_that_have_them(name: str, topology: Topology) -> None:
    """A source is named only if that worker's parts hold all of the part; a rank's own worker comes first."""
    summary = pieces.summarise(layouts.table(name, topology))
    known = coverage.masks(summary)
    for ready in range(256):
        by_worker = {w: [r for r in topology.ranks_of(w) if ready >> r & 1] for w in range(topology.workers)}
        sources, missing = coverage.part_sources(summary, by_worker)
        assert sorted([*sources, *missing]) == list(range(8))
        for rank, worker in sources.items():
            held = coverage.covered(summary, parts=by_worker[worker])
            assert not known.parts[rank] & ~held
            if ready >> rank & 1:
                assert worker == topology.worker_of(rank)
        if not missing:
            assert coverage.recoverable(summary, parts=pieces.bits(ready))


_EDGES = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))


@given(st.lists(_EDGES, min_size=1, max_size=5))
def test_atoms_are_the_same_elements_and_never_overlap(boxes: list[tuple[int, int, int, int]]) -> None:
    """Cut boxes are equal or disjoint, and each box is exactly the union of its atoms."""
    given_ = [Chunk("w", (a, c), (b, d), (9, 9), "float32") for a, b, c, d in boxes]
    atoms = chunks_.atomise(given_)
    for chunk in given_:
        assert set().union(*map(_cells, atoms[chunk])) == _cells(chunk)
        assert sum(atom.nbytes for atom in atoms[chunk]) == chunk.nbytes
    every = {atom for found in atoms.values() for atom in found}
    for first, second in itertools.combinations(every, 2):
        assert not _cells(first) & _cells(second)
