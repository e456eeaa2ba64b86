"""The acting coordinator as a process, killed, stopped and started again, over workers that only pretend."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.processes.run import cases

FAKE_CLI = pathlib.Path(__file__).with_name("fake_cli.py")


class FakeRun(cases.Run):
    """The same command line, over workers that only pretend."""

    def line(self, options: Sequence[str] = (), script: Sequence[str] = ()) -> list[str]:
        real = super().line(options, script)
        return [sys.executable, str(FAKE_CLI), *real[3:]]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[FakeRun]:
    memory = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    one = FakeRun(tmp_path, memory)
    yield one
    one.clean_up()
    shutil.rmtree(memory, ignore_errors=True)


def test_from_start_to_end(run: FakeRun) -> None:
    run.start()
    assert run.wait(30) == 0, run.text()
    run.left_nothing()
    status = run.status()
    assert (status["state"], status["attempt"], status["progress_step"]) == ("Complete", 1, 60)
    assert "[rank 0] hello from a rank" in run.console.read_text()
    assert "steps lost         0" in run.console.read_text()


@pytest.fixture
def long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not through before a signal that is sent to it arrives."""
    monkeypatch.setenv("FAKE_STEPS", "400")


@pytest.mark.usefixtures("long_job")
def test_ctrl_c_then_the_same_command_again(run: FakeRun) -> None:
    first = run.start()
    run.until(lambda: run.status().get("state") == "Running")
    first.send_signal(signal.SIGINT)
    assert run.wait(30) == 130, run.text()
    run.left_nothing()
    stopped_at = run.status()["progress_step"]
    assert run.status()["state"] == "Suspended"
    run.start()
    assert run.wait(30) == 0, run.text()
    status = run.status()
    assert (status["state"], status["attempt"]) == ("Complete", 2)
    assert status["lineage"][-1] == {"attempt": 2, "step": stopped_at, "parent": 1}


@pytest.mark.usefixtures("long_job")
def test_a_sigterm_is_as_good_as_a_ctrl_c(run: FakeRun) -> None:
    first = run.start()
    run.until(lambda: run.status().get("state") == "Running")
    first.send_signal(signal.SIGTERM)
    assert run.wait(30) == 130, run.text()
    assert run.status()["state"] == "Suspended"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_the_next_one_goes_on_and_does_nothing_twice(run: FakeRun, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(6):
        process = run.start()
        time.sleep(moments.uniform(0.1, 0.9))
        process.kill()
        process.wait()
    run.start()
    assert run.wait(30) == 0, run.text()
    run.left_nothing()
    status = run.status()
    assert (status["state"], status["attempt"]) == ("Complete", 1), run.text()
    starts = [json.loads(row)["message"] for row in (run.job / "events.jsonl").read_text().splitlines()]
    assert starts.count("Attempt 1 starts from the beginning") <= 1


def test_a_second_one_watches_and_takes_over_when_the_first_is_killed(run: FakeRun, tmp_path: pathlib.Path) -> None:
    first = run.start()
    run.until(lambda: run.status().get("state") == "Running")
    second = FakeRun(tmp_path, run.memory)
    second.console = tmp_path / "second.log"
    second.start()
    second.until(lambda: "is running this job; showing it" in second.console.read_text())
    first.kill()
    first.wait()
    assert second.wait(30) == 0, second.text()
    run.left_nothing()
    assert run.status()["attempt"] == 1
    assert "found running" in second.console.read_text()


def test_one_that_was_killed_when_the_job_was_complete_is_cleaned_up_after(run: FakeRun) -> None:
    first = run.start()
    run.until(lambda: run.status().get("state") == "Complete")
    first.kill()
    first.wait()
    run.start()
    assert run.wait(30) == 0, run.text()
    run.left_nothing()


def test_a_damaged_status_stops_a_take_over_before_anything_is_touched(run: FakeRun) -> None:
    first = run.start()
    run.until(lambda: run.status().get("state") == "Running")
    first.kill()
    first.wait()
    before = {found.pid for found in cases.processes.find(run.uid())}
    (run.job / "status.json").write_text("{")
    run.start()
    assert run.wait(30) == 2
    assert "status.json is damaged" in run.console.read_text()
    assert {found.pid for found in cases.processes.find(run.uid())} == before
