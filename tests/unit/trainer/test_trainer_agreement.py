"""The agreed layout stands in the volume before any part of it can be there, whichever rank is the first."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest
import torch.distributed as dist

from lastwords.protocol.chunks import Chunk, whole
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.trainer import layouts
from lastwords.trainer.agreement import Agreement

TOPOLOGY = Topology(workers=1, processes_per_worker=2)


class FakeSession:
    """What an Agreement needs of its session; each rank has a folder of its own here, to see who wrote what."""

    def __init__(self, rank: int, folder: pathlib.Path, store: Any) -> None:
        self.rank, self.topology, self.folder = rank, TOPOLOGY, str(folder)
        self._store = store

    def store_client(self) -> Any:
        return self._store

    def put(self, *_: Any) -> None:
        """The control block is of no interest here."""

    def send(self, *_: Any) -> None:
        """Nor is the agent."""


def both(tmp_path: pathlib.Path) -> list[tuple[Agreement, pathlib.Path]]:
    store = dist.HashStore()
    found = []
    for rank in range(2):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        session: Any = FakeSession(rank, folder, store)
        found.append((Agreement(session, lambda table: None), folder))
    return found


def agree(ranks: list[tuple[Agreement, pathlib.Path]], chunks: list[Chunk]) -> PieceTable:
    numbers = [agreement.begin(chunks) for agreement, _ in ranks]
    tables = [agreement.wait(number, 20) for (agreement, _), number in zip(ranks, numbers, strict=True)]
    assert tables[0] is not None and tables[0] == tables[1]
    return tables[0]


def test_each_rank_has_written_it_when_it_knows_it(tmp_path: pathlib.Path) -> None:
    ranks = both(tmp_path)
    table = agree(ranks, [whole("model.weight", "float32", (4, 4))])
    assert [layouts.known_table(str(folder)) for _, folder in ranks] == [table, table]


def test_an_older_one_that_comes_late_is_not_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = both(tmp_path)
    late, arrived = threading.Event(), threading.Event()
    prepare = ranks[1][0]._prepare

    def slow(table: PieceTable) -> None:
        if len(table.chunks) == 1:
            arrived.set()
            late.wait(20)
        prepare(table)

    monkeypatch.setattr(ranks[1][0], "_prepare", slow)
    first = [whole("model.weight", "float32", (4, 4))]
    for agreement, _ in ranks:
        agreement.begin(first)
    assert arrived.wait(20)
    newer = agree(ranks, [*first, whole("optimizer.step", "float32", ())])
    late.set()
    for thread in threading.enumerate():
        if thread.name == "lastwords-layout":
            thread.join(20)
    assert [layouts.known_table(str(folder)) for _, folder in ranks] == [newer, newer]


def test_ranks_that_write_at_once_leave_a_whole_file(tmp_path: pathlib.Path) -> None:
    (table,) = {agree(both(tmp_path), [whole(f"model.{i}", "float32", (4, 4)) for i in range(200)])}
    layouts.write_table(str(tmp_path), table, 0)
    threads = [
        threading.Thread(target=lambda rank=rank: [layouts.write_table(str(tmp_path), table, rank) for _ in range(50)])
        for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert layouts.known_table(str(tmp_path)) == table
    assert layouts.known_table(str(tmp_path)) == table
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["layout.json"]
