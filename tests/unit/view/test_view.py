"""What is shown: built from observations, rendered for a terminal and for a pipe that may break."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from lastwords.protocol import codec
from lastwords.protocol.messages import AgentReport, PartHolding, RankReport, RankState, RestoreSource
from lastwords_operator.coordinator import ports
from lastwords_operator.core import observation
from lastwords_operator.core.model import Condition, FaultKind, JobSpec, JobState, JobStatus, Recovery
from lastwords_operator.view import build, render, show
from lastwords_operator.view.model import EventView, JobView

RECOVERY = Recovery(
    kind=FaultKind.RANK_KILLED,
    message="Rank 1 was killed",
    attempt=1,
    rank=1,
    seconds_to_detect=0.02,
    detected_at=1000.02,
    kept_at=1000.05,
    stopped_at=1000.06,
    started_at=1000.07,
    restored_at=1000.2,
    first_step_at=1000.25,
    source=RestoreSource.MEMORY,
    step=30,
    steps_lost=0,
    exact=True,
)


def seen(steps: tuple[int | None, ...] = (31, 32), attempt: int = 2) -> tuple[observation.Observation, JobStatus]:
    ranks = tuple(
        RankReport(rank=rank, state=RankState.RUNNING, pid=100 + rank, step=step, loss=0.5, phase="train")
        for rank, step in enumerate(steps)
    )
    parts = tuple(
        PartHolding(rank=rank, slot=0, step=step, attempt=2, generation=1) for rank, step in ((0, 30), (1, 30), (0, 31))
    )
    report = AgentReport(worker=0, incarnation="a", attempt=attempt, ranks=ranks, parts=parts)
    status = JobStatus(
        state=JobState.RUNNING,
        attempt=2,
        recoveries=(RECOVERY,),
        newest_checkpoint=20,
        progress_step=30,
        message="all run",
    )
    spec = JobSpec(name="tiny", workers=1, processes_per_worker=2)
    view = observation.WorkerView(worker=0, incarnation="a", connected=True, report=report)
    return observation.Observation(now=1010.0, spec=spec, status=status, workers=(view,)), status


def view(steps: tuple[int | None, ...] = (31, 32), attempt: int = 2) -> JobView:
    obs, status = seen(steps, attempt)
    row = ports.Containers(
        worker=0, incarnation="a", pids={"agent": 11, "trainer": 22}, starts={"agent": 3, "trainer": 1}
    )
    events = [{"at": 1000.1, "reason": "RankKilled", "message": "Rank 1 was killed", "warning": True}]
    return build.job_view(obs, status, [row], folder="/somewhere/tiny", started_at=900.0, events=events)


def test_built_from_an_observation() -> None:
    one = view()
    assert (one.step, one.loss, one.snapshot_step, one.checkpoint_step) == (31, 0.5, 30, 20)
    assert (one.workers[0].agent_pid, one.workers[0].launcher_pid, one.workers[0].agent_restarts) == (11, 22, 2)
    assert codec.loads(JobView, codec.dumps(one)) == one


@pytest.mark.parametrize(("steps", "attempt"), [((None, 32), 2), ((), 2), ((5, 5), 1)])
def test_the_step_never_seems_to_go_back_while_ranks_restart(steps: tuple[int | None, ...], attempt: int) -> None:
    assert view(steps, attempt).step == 30


def test_a_recovery_counts_milliseconds_from_the_fault() -> None:
    (row,) = view().recoveries
    assert row.fault == "rank killed of rank 1"
    assert [(name, round(ms)) for name, ms in row.phases] == [
        ("noticed", 20),
        ("kept", 50),
        ("stopped", 60),
        ("restarted", 70),
        ("restored", 200),
        ("first new step", 250),
    ]
    assert row.done


def test_every_fault_has_a_word() -> None:
    for kind in FaultKind:
        assert build.recovery_view(1, Recovery(kind=kind, message="", attempt=1)).fault


def test_the_live_picture_has_it_all() -> None:
    text = render.to_text(render.live(view(), ["[rank 0] step 31"]), width=160)
    for word in ("tiny", "Running", "attempt 2", "snapshot 30", "checkpoint 20", "11, 2 restarts", "0.5000"):
        assert word in text
    assert "noticed 20 → kept 50" in text
    assert "[rank 0] step 31" in text


def test_a_job_whose_restarts_are_cold_says_why() -> None:
    obs, status = seen()
    words = "`bash run.sh` is run as it is: no warm start"
    cold = dataclasses.replace(
        status, conditions=(Condition(type="WarmStart", status=False, reason="x", message=words),)
    )
    one = build.job_view(obs, cold, [], folder="/f", started_at=900.0, events=[])
    assert words in render.to_text(render.live(one, []), width=160)
    assert f"restarts           {words}" in render.to_text(render.summary(one), width=160)
    assert "restarts  " not in render.to_text(render.summary(view()), width=160)


def test_the_summary_says_what_was_lost() -> None:
    text = render.to_text(render.summary(view()), width=160)
    assert "faults survived    1" in text
    assert "steps lost         0" in text


def test_markup_in_texts_of_others_is_shown_as_it_is() -> None:
    obs, status = seen()
    event = {"at": 1.0, "reason": "x", "message": "[/red] tensors[0] [bold]"}
    one = build.job_view(obs, status, [], folder="/a[b]", started_at=0.0, events=[event])
    text = render.to_text(render.live(one, ["[bold]x"]), width=160)
    assert "[/red] tensors[0] [bold]" in text
    assert "[bold]x" in text
    assert "/a[b]" in render.to_text(render.summary(one))


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    plain = show.PlainDisplay(progress_seconds=10)
    plain.event(EventView(at=0.0, kind="Failed", text="ValueError\nTraceback: here"))
    plain.log("[rank 0] hello")
    for at, step in ((1.0, 1), (2.0, 2), (11.5, 3)):
        plain.update(JobView(name="x", folder="/x", at=at, state="Running", step=step))
    plain.close(None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("Failed: ValueError")
    assert lines[1:3] == ["Traceback: here", "[rank 0] hello"]
    assert [line.split("step ")[1].split(",")[0] for line in lines[3:]] == ["1", "3"]


def test_a_broken_pipe_ends_the_display_and_not_the_job() -> None:
    code = """
import sys
from lastwords_operator.view import show
display = show.display(plain=True)
for number in range(20000):
    display.log("a line " + str(number))
print("still here", file=sys.stderr)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"still here\n"
    assert process.wait(30) == 0
    process.stderr.close()


def test_a_terminal_gets_the_live_view() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from lastwords_operator.view import show
import test_view
display = show.display(plain=False)
display.update(test_view.view())
display.close(test_view.view())
"""
    main, other = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=other, stderr=subprocess.PIPE, env=environment)
    os.close(other)
    data = b""
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        while piece := os.read(main, 4096):
            data += piece
    os.close(main)
    assert process.communicate(timeout=30)[1] == b""
    text = data.decode()
    assert "recoveries" in text
    assert "\x1b[" in text
