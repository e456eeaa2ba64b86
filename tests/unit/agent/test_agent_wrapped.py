"""What an agent makes of a wrapped command: ranks are found, not started, and may outlive the command or it them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from lastwords.agent import starting
from lastwords.agent.local import Connection
from lastwords.agent.settings import Settings
from lastwords.agent.volume import Volume
from lastwords.agent.worker import Worker
from lastwords.protocol import wire
from lastwords.protocol.messages import RankState, RunState, WorkerOrder
from lastwords.protocol.pieces import Topology

TOPOLOGY = Topology(workers=2, processes_per_worker=2)
ADDRESS = "127.0.0.1:4000"


class Spoken(Connection):
    """Keeps what is sent over it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def worker(tmp_path: pathlib.Path) -> Worker:
    """Worker 1 of 2, whose ranks are to run in attempt 1."""
    settings = Settings(
        volume=str(tmp_path), worker=1, incarnation="i", coordinator="unix:/x", storage="/x", job_uid="u",
        job_name="j", namespace="n", token="t", topology=TOPOLOGY,
    )  # fmt: skip
    made = Worker(settings, Volume(str(tmp_path), 2))
    made.take_order(WorkerOrder(epoch=1, number=1, attempt=1, run=RunState.RUNNING, topology=TOPOLOGY))
    return made


@pytest.fixture
def launcher(worker: Worker) -> Spoken:
    connection = Spoken()
    worker.take(connection, wire.LauncherHello(pid=7, wrapped=True, notices={"wrapped": "run as it is"}))
    worker.take(connection, wire.Processes(attempt=0, processes=()))
    starting.reconcile(worker)
    return connection


def tell(worker: Worker, launcher: Spoken, **ranks: Any) -> None:
    """The launcher's report, the same for both ranks."""
    rows = tuple(wire.RankProcess(rank=rank, **ranks) for rank in worker.own_ranks)
    worker.take(launcher, wire.Processes(attempt=1, processes=rows))


def hello(worker: Worker, rank: int, pid: int) -> Spoken:
    connection = Spoken()
    worker.take(connection, wire.RankHello(rank=rank, attempt=1, pid=pid))
    return connection


def state(worker: Worker, rank: int) -> tuple[RankState, bool, str]:
    report = worker.ranks[rank].report(None, 0)
    return report.state, report.in_tail, worker.ranks[rank].broken()


def test_the_user_is_told_that_it_is_wrapped(worker: Worker, launcher: Spoken) -> None:
    assert [(notice.code, notice.text) for notice in worker.notices.values()] == [("wrapped", "run as it is")]


def test_the_launcher_hears_of_the_stores_address_when_it_is_known(worker: Worker, launcher: Spoken) -> None:
    assert [message.store_address for message in launcher.of(wire.RunRanks)] == [""]
    known = WorkerOrder(
        epoch=1, number=2, attempt=1, run=RunState.RUNNING, topology=TOPOLOGY, store_address=ADDRESS
    )  # fmt: skip
    worker.take_order(known)
    for _ in range(3):
        starting.reconcile(worker)
    assert [message.store_address for message in launcher.of(wire.RunRanks)] == ["", ADDRESS]


def test_where_a_launcher_keeps_a_port_its_address_is_the_attempts(worker: Worker, launcher: Spoken) -> None:
    worker.take(launcher, wire.Processes(attempt=1, processes=(), store_address=ADDRESS))
    assert worker.store_address == ADDRESS
    tell(worker, launcher, pid=10, alive=True, command_alive=True)
    assert worker.store_address == ADDRESS


def test_ranks_that_say_hello_are_told_to_the_launcher_once(worker: Worker, launcher: Spoken) -> None:
    tell(worker, launcher, pid=10, alive=True, command_alive=True)
    assert launcher.of(wire.RanksFound) == []
    hello(worker, 2, 21)
    hello(worker, 3, 31)
    for _ in range(3):
        starting.reconcile(worker)
    assert launcher.of(wire.RanksFound) == [wire.RanksFound(attempt=1, pids={2: 21, 3: 31})]


def test_a_second_training_process_is_refused_and_the_same_one_may_come_back(worker: Worker, launcher: Spoken) -> None:
    first = hello(worker, 2, 21)
    worker.lost(first)
    hello(worker, 2, 21)
    assert "second-process" not in {code for code, _ in worker.notices}
    second = Spoken()
    assert worker.take(second, wire.RankHello(rank=2, attempt=1, pid=22)) is None
    notice = worker.notices["second-process", 2]
    assert notice.fatal
    assert "process 22 after 21" in notice.text


def test_a_dead_rank_is_told_though_its_command_goes_on_and_the_command_counts_as_running(
    worker: Worker, launcher: Spoken
) -> None:
    hello(worker, 2, 21)
    tell(worker, launcher, pid=21, alive=False, signal=9, command_alive=True)
    assert state(worker, 2) == (RankState.EXITED, False, "its process died")
    assert worker.any_alive()  # so it is stopped
    tell(worker, launcher, pid=21, alive=False, signal=9, command_alive=False)
    assert not worker.any_alive()


def test_a_rank_that_outlives_its_command_is_a_fault_with_the_commands_end(worker: Worker, launcher: Spoken) -> None:
    hello(worker, 2, 21)
    tell(worker, launcher, pid=21, alive=True, signal=9, command_alive=False)
    assert state(worker, 2) == (RankState.ERRORED, False, "the command that started it ended")
    exit_ = worker.ranks[2].report(None, 0).exit
    assert exit_ is not None and exit_.signal == 9


def test_a_command_that_goes_on_after_its_ranks_is_in_its_tail(worker: Worker, launcher: Spoken) -> None:
    connection = hello(worker, 2, 21)
    worker.take(connection, wire.ScriptEnded(exit=None))
    tell(worker, launcher, pid=21, alive=False, command_alive=True)
    assert state(worker, 2) == (RankState.FINISHED, True, "")
    tell(worker, launcher, pid=21, alive=False, code=0, command_alive=False)
    assert state(worker, 2) == (RankState.FINISHED, False, "")
    tell(worker, launcher, pid=21, alive=False, code=3, command_alive=False)
    assert state(worker, 2)[0] is RankState.EXITED  # what came after training failed
