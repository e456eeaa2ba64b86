"""Layouts that would lose or mix up a part of the state: each stops the job and says what to change."""

from __future__ import annotations

import pathlib
import shutil
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lastwords.protocol import volume, wire
from lastwords.protocol.chunks import Chunk, whole
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.trainer import copying
from lastwords.trainer.agreement import Agreement
from lastwords.trainer.collect import Live
from lastwords.trainer.floors import FLOOR, VOID
from lastwords.trainer.parts import StateError
from lastwords.trainer.restoring import Restored
from tests.unit.trainer.one_process import Process

TOPOLOGY = Topology(workers=1, processes_per_worker=2)


class Rank:
    """What an Agreement needs of its session; keeps what the agent would be told."""

    def __init__(self, rank: int, folder: pathlib.Path, store: Any) -> None:
        self.rank, self.topology, self.folder, self._store = rank, TOPOLOGY, str(folder), store
        self.notices: list[wire.RankNotice] = []
        session: Any = self
        self.agreement = Agreement(session, lambda table: None)
        self.decisions: dict[int, str] = {}

    def store_client(self) -> Any:
        return self._store

    def put(self, *_: Any) -> None:
        """The control block is of no interest here."""

    def send(self, message: Any) -> None:
        if isinstance(message, wire.RankNotice):
            self.notices.append(message)

    def prove(self, table: PieceTable, step: int, *tensors: torch.Tensor) -> None:
        """Take part in the comparison at `step`; `tensors` in the order of the chunks."""
        live = [Live(chunk, t, t) for chunk, t in zip(table.chunks, tensors, strict=True)]
        digests = copying.content_digests(table, self.rank, live)
        self.agreement.prove(table, step, digests, self.decisions.get)


def ranks_in(folder: pathlib.Path, known: Sequence[Rank] = ()) -> list[Rank]:
    """Two ranks of an attempt; those in `known` are of the attempt before."""
    store = dist.HashStore()
    found = []
    for rank in range(2):
        own = folder / f"rank-{rank}"
        own.mkdir(parents=True)
        if known:
            shutil.copy(pathlib.Path(known[rank].folder) / volume.LAYOUT, own)
        found.append(Rank(rank, own, store))
    return found


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> list[Rank]:
    return ranks_in(tmp_path)


def agree(ranks: list[Rank], *layouts: list[Chunk]) -> PieceTable | None:
    """All ranks exchange their layouts; None when that does not succeed."""
    numbers = [rank.agreement.begin(layout) for rank, layout in zip(ranks, layouts, strict=True)]
    until(lambda: all(r.notices or r.agreement.table(n) for r, n in zip(ranks, numbers, strict=True)))
    return ranks[0].agreement.table(numbers[0])


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def fatal(rank: Rank, code: str) -> str:
    """The notice that stops the job."""
    until(lambda: rank.notices)
    (notice,) = rank.notices
    assert (notice.code, notice.fatal) == (code, True)
    return notice.text


def test_stages_with_local_names_are_no_replicas(ranks: list[Rank]) -> None:
    """Two stages of a pipeline that both call their first layer 0: one half of the model would be lost."""
    layout = [whole("model.layers.0.weight", "float32", (3,))]
    table = agree(ranks, layout, layout)
    assert table is not None and ranks[0].agreement.needs_proof(table)
    for rank in ranks:
        rank.prove(table, 4, torch.full((3,), float(rank.rank)))
        rank.decisions[4] = FLOOR
    text = fatal(ranks[1], "replicas-differ")
    assert "model.layers.0.weight is not the same on ranks 0 and 1" in text
    assert "give each module a name that is unique over all ranks" in text


def test_boxes_that_overlap_only_in_part_are_compared_where_they_do(ranks: list[Rank]) -> None:
    """One rank has the whole tensor, the other one the second half of it."""
    half = Chunk("w", (2,), (2,), (4,), "float32")
    table = agree(ranks, [whole("w", "float32", (4,))], [half])
    assert table is not None
    for rank, values in zip(ranks, ([1.0, 2.0, 3.0, 4.0], [3.0, 5.0]), strict=True):
        tensor = torch.tensor(values)
        live = [Live(whole("w", "float32", (4,)) if rank.rank == 0 else half, tensor, tensor)]
        digests = copying.content_digests(table, rank.rank, live)
        rank.agreement.prove(table, 1, digests, lambda step: FLOOR)
    assert "w[2:4]" in fatal(ranks[1], "replicas-differ")


def test_copies_are_compared_at_one_step_only(ranks: list[Rank]) -> None:
    """A rank that skipped a snapshot is compared at the next one: the state of another step is no difference."""
    layout = [whole("w", "float32", (3,))]
    table = agree(ranks, layout, layout)
    assert table is not None
    ranks[0].prove(table, 4, torch.full((3,), 4.0))
    assert not ranks[0].agreement.needs_proof(table), "one comparison at a time"
    for rank in ranks:
        rank.decisions[4] = VOID
    until(lambda: ranks[0].agreement.needs_proof(table))
    for rank in ranks:
        assert rank.agreement.needs_proof(table)
        rank.prove(table, 5, torch.full((3,), 5.0))
        rank.decisions[5] = FLOOR
    time.sleep(0.1)
    until(lambda: all(not rank.agreement.needs_proof(table) for rank in ranks))
    assert [rank.notices for rank in ranks] == [[], []]


def test_a_name_that_means_two_things(ranks: list[Rank]) -> None:
    assert agree(ranks, [whole("w", "float32", (3,))], [whole("w", "float32", (4,))]) is None
    text = fatal(ranks[0], "layout")
    assert "'w' means two things: float32[3] on rank 0, float32[4] on rank 1" in text
    assert "Give each tensor a globally unique name" in text


def test_a_tensor_with_a_gap(ranks: list[Rank]) -> None:
    """A wrong box that has the right size leaves a gap where the right one would be."""
    layouts = [[Chunk("w", (0, 0), (2, 4), (4, 4), "float32")] for _ in range(2)]
    assert agree(ranks, *layouts) is None
    text = fatal(ranks[1], "layout")
    assert "16 elements, but all ranks together hold 8" in text and "divisible by the product" in text


def test_what_only_the_saved_state_has_stops_the_job_when_no_rank_has_it(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.agreement.restored(Restored(elsewhere=frozenset({"a", "b", "gone"})))
    assert agree(ranks, [whole("a", "float32", (3,))], [whole("b", "float32", (3,))]) is None
    text = fatal(ranks[0], "wrong-model")
    assert "another model" in text and "only in the saved state: gone" in text


def test_what_other_ranks_have_is_not_missing(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.agreement.restored(Restored(elsewhere=frozenset({"a", "b"})))
    assert agree(ranks, [whole("a", "float32", (3,))], [whole("b", "float32", (3,))]) is not None


def test_copies_are_compared_again_when_a_restore_unfroze_something(tmp_path: pathlib.Path) -> None:
    """DistributedDataParallel does not keep parameters equal that were frozen when it was made."""
    layout = [whole("w", "float32", (3,))]
    first = ranks_in(tmp_path / "first")
    assert agree(first, layout, layout) is not None
    for thawed in (False, True):
        later = ranks_in(tmp_path / str(thawed), known=first)
        for rank in later:
            rank.agreement.restored(Restored(thawed=thawed))
        table = agree(later, layout, layout)
        assert table is not None and table.generation == 1
        assert [rank.agreement.needs_proof(table) for rank in later] == [thawed, thawed]


# --- in one rank -------------------------------------------------------------------------------------


class Shard(torch.Tensor):
    """A tensor of shards that describes itself as torch's checkpoints want it."""

    box: Any
    local: torch.Tensor

    def __create_chunk_list__(self) -> list[Any]:
        return [self.box]

    def to_local(self) -> torch.Tensor:
        return self.local


def shard(local: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Shard:
    made = torch.zeros(shape).as_subclass(Shard)
    made.box, made.local = types.SimpleNamespace(offsets=offsets, sizes=sizes), local
    return made


def momentum(tensor: torch.Tensor) -> Process:
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = tensor
    return Process(model=model, optimizer=optimizer)


def test_a_shard_is_listed_at_its_place() -> None:
    local = torch.ones(2, 3)
    listed = momentum(shard(local, (2, 0), (2, 3), (4, 3))).collector.state.stable[-1]
    assert listed.chunk == Chunk("optimizer.state.model.weight.momentum_buffer", (2, 0), (2, 3), (4, 3), "float32")
    assert listed.local.data_ptr() == local.data_ptr()


def test_a_shard_whose_size_is_not_its_box_is_refused() -> None:
    """As torch gives it for fully_shard on a tensor-parallel module with uneven rows."""
    with pytest.raises(StateError) as refused:
        momentum(shard(torch.ones(1, 3), (2, 0), (2, 3), (4, 3)))
    text = str(refused.value)
    assert "optimizer.state.model.weight.momentum_buffer is [4, 3] and cut into shards" in text
    assert "[2, 3] at [2, 0], but it is [1, 3]" in text and "make it divisible by the product of both cuts" in text


def test_a_shard_that_moves_is_noticed() -> None:
    moving = shard(torch.ones(2, 3), (2, 0), (2, 3), (4, 3))
    process = momentum(moving)
    assert not process.collector.refresh()
    moving.local = torch.full((2, 3), 2.0)
    process.collector.refresh()
    assert process.collector.state.stable[-1].local.data_ptr() == moving.local.data_ptr()


def test_a_buffer_cut_into_shards_is_refused() -> None:
    model = nn.Linear(3, 4)
    model.register_buffer("cache", shard(torch.ones(2, 3), (2, 0), (2, 3), (4, 3)))
    with pytest.raises(StateError, match="model.cache is a buffer cut into shards.*Make it a replicated buffer"):
        Process(model=model)
