"""`lastwords run` from end to end: faults of every process, and a run that equals the undisturbed one."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import pytest

from lastwords.protocol import control
from lastwords_operator.local import processes
from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_undisturbed(run: cases.Run, reference: pathlib.Path) -> None:
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    assert run.status()["recoveries"] == []
    again = run.start()
    assert again.wait(30) == 0
    assert "complete already" in run.console.read_text()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("kill rank=1 at-step=23", "RankKilled"),
        ("kill rank=0 at-step=23", "RankKilled"),
        ("kill launcher worker=1 at-step=23", "LauncherLost"),
    ],
)
def test_a_death_loses_no_step(run: cases.Run, reference: pathlib.Path, fault: str, kind: str) -> None:
    run.start([f"--inject={fault}"])
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["source"], recovery["steps_lost"]) == (kind, "memory", 0)
    assert recovery["exact"]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_lost_worker_is_replaced_and_restored_from_the_memory_of_the_others(
    run: cases.Run, reference: pathlib.Path, worker: int
) -> None:
    run.start([f"--inject=lose worker={worker} at-step=23"])
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["worker"], recovery["source"]) == ("WorkerLost", worker, "memory")
    assert (recovery["exact"], recovery["steps_lost"]) == (True, 0)


def test_o_03_a_hang_is_found_and_loses_no_step(run: cases.Run, reference: pathlib.Path) -> None:
    run.start(["--inject=stop rank=2 at-step=23"])
    assert run.wait(150) == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["rank"], recovery["source"]) == ("Hang", 2, "memory")


def test_a_dead_agent_disturbs_nothing(run: cases.Run, reference: pathlib.Path) -> None:
    run.start(["--inject=kill agent worker=1 at-step=23"])
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    assert run.status()["recoveries"] == []


def test_the_coordinator_may_be_killed_and_the_next_one_goes_on(run: cases.Run, reference: pathlib.Path) -> None:
    first = run.start()
    run.until_step(20)
    first.kill()
    first.wait()
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    assert run.status()["attempt"] == 1
    assert "found running" in run.console.read_text()


def test_the_coordinator_and_a_rank_die_together(run: cases.Run, reference: pathlib.Path) -> None:
    first = run.start()
    run.until_step(20)
    first.kill()
    first.wait()
    (launcher, _) = run.containers("lastwords.launcher")
    os.kill(launcher, signal.SIGKILL)
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    assert run.status()["recoveries"][-1]["steps_lost"] == 0


def test_ctrl_c_stops_with_the_state_saved_and_the_same_command_goes_on(
    run: cases.Run, reference: pathlib.Path
) -> None:
    first = run.start()
    run.until_step(20)
    first.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    run.left_nothing()
    status = run.status()
    assert status["state"] == "Suspended"
    assert status["newest_checkpoint"] == status["progress_step"] >= 20
    run.out.unlink(missing_ok=True)  # the script wrote it when its steps ended early
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()


def test_a_second_ctrl_c_ends_at_once_and_memory_is_kept(run: cases.Run, reference: pathlib.Path) -> None:
    first = run.start()
    run.until_step(20)
    first.send_signal(signal.SIGINT)
    run.until(lambda: "Interrupted" in run.console.read_text())
    first.send_signal(signal.SIGINT)
    assert run.wait(20) == 130, run.text()
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()


def test_without_a_coordinator_the_workers_give_last_words_and_end(run: cases.Run, reference: pathlib.Path) -> None:
    first = run.start(["--coordinator-lost-seconds=2"])
    run.until_step(10)
    first.kill()
    first.wait()
    run.process = None
    run.until(lambda: not cases.processes.find(run.uid()), 60)
    assert max(run.steps().values()) < cases.STEPS - 1
    run.start()
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()


def test_a_second_run_watches_and_says_the_same(run: cases.Run, tmp_path: pathlib.Path) -> None:
    run.start()
    run.until_step(5)
    second = cases.Run(tmp_path, run.memory)
    second.console = tmp_path / "second.log"
    second.start()
    assert run.wait() == 0, run.text()
    assert second.wait(20) == 0
    text = second.console.read_text()
    assert "is running this job; showing it" in text
    assert "Complete" in text


def test_o_10_a_worker_that_is_told_to_stop_stops_with_all_others_after_one_step(
    run: cases.Run, reference: pathlib.Path
) -> None:
    """Only the launcher of one worker gets the signal, while a rank of the other one is behind."""
    run.start()
    run.until_step(15)
    memory = {int(path.name.split("-")[1]): path for path in run.memory.rglob("control-*")}
    slow = control.get(memoryview(memory[3].read_bytes()), control.Word.PID)
    found = [row for row in processes.find(run.uid()) if row.is_container("lastwords.launcher")]
    told = next(row.pid for row in found if row.worker == 0)
    os.kill(slow, signal.SIGSTOP)
    os.kill(told, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(slow, signal.SIGCONT)
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["worker"], recovery["steps_lost"]) == ("WorkerStopping", 0, 0)
    assert recovery["exact"]
