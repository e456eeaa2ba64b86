"""How a job ends once its steps are made: saved first, then whatever the script does after its last step."""

from __future__ import annotations

from lastwords.protocol.messages import RankState, StorageReport
from lastwords_operator.core import decide
from lastwords_operator.core.model import JobState, JobStatus, Stop, StopKind
from lastwords_operator.core.observation import Decision
from tests.unit.core import build

JOB = build.spec()


def _through(status: JobStatus, now: float, *, in_tail: bool, saved: bool = True) -> Decision:
    stored = StorageReport(loaded=True, checkpoints=(build.checkpoint(10, kind="final"),) if saved else ())
    reports = [
        build.report(
            JOB,
            worker,
            storage=stored,
            ranks=tuple(
                build.rank(n, state=RankState.FINISHED, in_tail=in_tail and n == 3)
                for n in JOB.topology.ranks_of(worker)
            ),
        )
        for worker in range(JOB.workers)
    ]
    return decide.decide(build.observe(JOB, status, list(reports), now=now, stop_requested=status.stop is not None))


def test_a_script_that_goes_on_after_its_last_step_is_not_cut_off() -> None:
    first = _through(build.status(), build.NOW, in_tail=True)
    assert first.status.state is JobState.RUNNING
    assert "ranks [3] go on" in first.status.message
    hours_later = _through(first.status, build.NOW + JOB.deadlines.tail - 1, in_tail=True)
    assert hours_later.status.state is JobState.RUNNING
    assert (
        _through(hours_later.status, build.NOW + JOB.deadlines.tail - 1, in_tail=False).status.state
        is JobState.COMPLETE
    )


def test_a_script_that_never_ends_is_ended_with_a_warning() -> None:
    first = _through(build.status(), build.NOW, in_tail=True)
    last = _through(first.status, build.NOW + JOB.deadlines.tail, in_tail=True)
    assert last.status.state is JobState.COMPLETE
    assert [event.reason for event in last.events if event.warning] == ["TailCutOff"]


def test_after_a_stop_by_the_user_the_script_has_until_the_deadline_of_the_stop() -> None:
    stop = Stop(kind=StopKind.SUSPEND, reason="Ctrl-C", deadline=build.NOW + 60)
    stopped = build.status(stop=stop, plan=build.stop_plan(10))
    first = _through(stopped, build.NOW, in_tail=True)
    assert first.status.state is JobState.RUNNING
    assert _through(first.status, build.NOW + 59, in_tail=True).status.state is JobState.RUNNING
    assert _through(first.status, build.NOW + 60, in_tail=True).status.state is JobState.SUSPENDED
    assert _through(first.status, build.NOW + 5, in_tail=False).status.state is JobState.SUSPENDED


def test_the_end_of_the_script_alone_completes_nothing() -> None:
    """The last step has to be on storage too."""
    assert _through(build.status(), build.NOW, in_tail=False, saved=False).status.state is JobState.RUNNING
