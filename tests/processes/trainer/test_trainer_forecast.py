"""
A rank that dies between its last gradient and its update: others pass the boundary without it, so its record of that
boundary must be there already.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest

from lastwords.protocol import areas, volume
from lastwords.protocol.control import Word
from lastwords.trainer import hoststate
from tests.processes.trainer.fake_agent import FakeAgent

pytestmark = pytest.mark.slow

SCRIPT = """
import os, random, time
import torch
from lastwords import Checkpointer

accumulate, stop_at = int(os.environ.get("ACCUMULATE", "1")), 6
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in checkpointer.steps(100):
    if step == stop_at + 1 and os.environ.get("STOP") == "past":
        print("past the last backward", flush=True)
        time.sleep(600)
    optimizer.zero_grad()
    for part in range(accumulate):
        if step == stop_at and part == accumulate - 1 and os.environ.get("STOP") == "before":
            print("before the last backward", flush=True)
            time.sleep(600)
        random.random()
        model(torch.ones(2, 4)).sum().backward()
    if step == stop_at and os.environ.get("STOP") == "after":
        print("after the last backward", flush=True)
        time.sleep(600)
    if os.environ.get("DRAW_LATE"):
        random.random()
    if step % 3 != 2:
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "forecast.py"
    path.write_text(SCRIPT)
    return path


def record(agent: FakeAgent, step: int, *, provisional: bool) -> Any:
    """The record in the area of `step`; the caller looks at its head."""
    data = memoryview((agent.folder / volume.records(0)).read_bytes())
    size = len(data) // volume.RECORD_AREAS
    index = volume.record_area_index(step, provisional=provisional)
    body = areas.read(data[index * size : (index + 1) * size])
    return hoststate.parse_record(body) if body is not None else None


def stop(agent: FakeAgent, script: pathlib.Path, place: str, attempt: int = 1, **environment: str) -> None:
    """Run until the script stands at that place of step 6, and kill it."""
    agent.start(script, attempt=attempt, STOP=place, **environment)
    deadline = time.monotonic() + 60
    while f"{place} the last backward" not in agent.log():
        assert time.monotonic() < deadline, agent.log()
        time.sleep(0.02)
    os.kill(agent.processes[0].pid, signal.SIGKILL)
    agent.processes[0].wait()


@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_the_record_is_there_before_any_other_rank_can_pass(
    agent: FakeAgent, script: pathlib.Path, accumulate: str
) -> None:
    stop(agent, script, "after", ACCUMULATE=accumulate)
    assert (agent.word(Word.STEP) - 1, agent.word(Word.UPDATE_COUNTER) % 2) == (6, 0)
    coming = record(agent, 7, provisional=True)
    assert (coming.head.step, coming.head.provisional, coming.head.exact) == (7, True, True)
    stop(agent, script, "past", attempt=2, ACCUMULATE=accumulate)
    final = record(agent, 7, provisional=False)
    assert (final.head.step, final.head.attempt) == (7, 2)
    assert final.metadata["own"] == coming.metadata["own"]


def test_of_several_backward_passes_only_the_last_one_counts(agent: FakeAgent, script: pathlib.Path) -> None:
    stop(agent, script, "before", ACCUMULATE="3")
    coming = record(agent, 7, provisional=True)
    assert coming is None or coming.head.step != 7


def test_where_it_was_wrong_once_it_is_not_written_any_more_and_the_late_one_is(
    agent: FakeAgent, script: pathlib.Path
) -> None:
    stop(agent, script, "after", DRAW_LATE="1")
    coming = record(agent, 7, provisional=True)
    assert coming is None or coming.head.step != 7
    late = record(agent, 5, provisional=True)
    assert (late.head.step, late.head.exact) == (5, True)
