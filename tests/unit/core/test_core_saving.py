"""What the job's condition says of saving."""

from __future__ import annotations

import pytest

from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import StorageReport
from lastwords_operator.core.decide import decide
from tests.unit.core import build


@pytest.mark.parametrize(
    ("seconds", "last", "told"), [(30.0, 5.0, False), (61.0, 5.0, True), (61.0, 25.0, False), (200.0, 25.0, True)]
)
def test_O_36_a_save_that_takes_very_long_is_told_before_it_fails(seconds: float, last: float, told: bool) -> None:
    storage = StorageReport(
        loaded=True, persisting=CheckpointId(step=10, attempt=1), persisting_seconds=seconds, commit_seconds_last=last
    )
    decision = decide(build.job_with(build.spec(), storage=storage))
    (condition,) = [item for item in decision.status.conditions if item.type == "CheckpointHealthy"]
    assert condition.status is not told
    assert [event.reason for event in decision.events if event.reason == "SaveSlow"] == ["SaveSlow"] * told
    if told:
        assert "The save of step 10 has been going on for over" in condition.message
        assert "Training goes on" in condition.message
