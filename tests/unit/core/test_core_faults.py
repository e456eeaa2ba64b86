"""Which fault an observation shows: kinds, roots and echoes, hangs and their culprits."""

from __future__ import annotations

import dataclasses

import pytest

from lastwords.protocol.messages import ExitReport, Notice, Prepared, RankReport, RankState, StackReport
from lastwords_operator.core import decide, faults
from lastwords_operator.core.model import Deadlines, FaultKind
from lastwords_operator.core.observation import DEAD, TRAINER
from tests.unit.core import build

JOB = build.spec()


def _dead(number: int, **exit_: object) -> RankReport:
    return build.rank(number, state=RankState.EXITED, exit=ExitReport(**exit_))  # type: ignore[arg-type]


def _raised(number: int, exception: str, *, secondary: bool = False, message: str = "no") -> RankReport:
    return build.rank(
        number, state=RankState.ERRORED, exit=ExitReport(exception=exception, message=message, secondary=secondary)
    )


@pytest.mark.parametrize(
    ("ranks", "kind", "number", "infrastructure"),
    [
        pytest.param([_dead(1, signal=9)], FaultKind.RANK_KILLED, 1, True, id="SIGKILL"),
        pytest.param([_dead(1, signal=15)], FaultKind.RANK_KILLED, 1, True, id="SIGTERM"),
        pytest.param([_dead(1, code=137)], FaultKind.RANK_KILLED, 1, True, id="137"),
        pytest.param([_dead(1, code=143)], FaultKind.RANK_KILLED, 1, True, id="143"),
        pytest.param([_dead(1, signal=11)], FaultKind.RANK_CRASHED, 1, False, id="SIGSEGV"),
        pytest.param([_dead(1, code=139)], FaultKind.RANK_CRASHED, 1, False, id="139"),
        pytest.param([_dead(1, code=1)], FaultKind.RANK_EXITED, 1, False, id="exit-code-1"),
        pytest.param([build.rank(1, state=RankState.EXITED)], FaultKind.RANK_KILLED, 1, True, id="vanished"),
        pytest.param([_raised(2, "builtins.ValueError")], FaultKind.USER_EXCEPTION, 2, False, id="exception"),
        pytest.param(
            [_raised(0, "RuntimeError", secondary=True), _raised(2, "ValueError")],
            FaultKind.USER_EXCEPTION, 2, False, id="exception-and-its-echo",
        ),
        pytest.param(
            [_raised(0, "RuntimeError"), _dead(3, signal=9)], FaultKind.RANK_KILLED, 3, True, id="kill-beats-exception"
        ),
        pytest.param(
            [_raised(1, "lastwords.trainer.reading.RestoreError")], FaultKind.RESTORE_FAILED, 1, True, id="damaged"
        ),
    ],
)  # fmt: skip
def test_one_class_for_each_failure_O_20(
    ranks: list[RankReport], kind: FaultKind, number: int, infrastructure: bool
) -> None:
    """Kind, rank and budget of each way in which a rank can end."""
    fault = faults.find(build.job_with(JOB, *ranks))
    assert fault is not None
    assert (fault.kind, fault.rank, fault.infrastructure) == (kind, number, infrastructure)


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_is_through_is_no_fault(code: int | None) -> None:
    """Finished, or left with 0."""
    ranks = [_dead(0, code=0), build.rank(1, state=RankState.FINISHED, exit=ExitReport(code=code))]
    assert faults.find(build.job_with(JOB, *ranks)) is None


def test_ranks_of_an_older_attempt_start_nothing_O_21() -> None:
    """What we ended ourselves is told apart by its attempt."""
    seen = build.job_with(JOB, _dead(1, signal=9), status_=build.status(attempt=2))
    assert faults.find(seen) is None


def test_echoes_alone_are_the_network_after_two_seconds() -> None:
    """Provisional first, settled once they have lasted."""
    seen = build.job_with(JOB, _raised(0, "RuntimeError", secondary=True))
    first = faults.find(seen)
    assert first is not None
    assert first.provisional
    known = dataclasses.replace(seen.status, suspicions={"secondary": build.NOW - 2.0})
    later = faults.find(build.changed(seen, status=known))
    assert later is not None
    assert (later.kind, later.provisional, later.infrastructure) == (FaultKind.NETWORK, False, True)


def test_the_time_before_this_coordinator_does_not_count_O_29() -> None:
    """A suspicion that an earlier coordinator noted starts anew."""
    known = build.status(suspicions={"secondary": 1.0})
    seen = build.job_with(JOB, _raised(0, "RuntimeError", secondary=True), status_=known)
    fault = faults.find(build.changed(seen, coordinator_started_at=build.NOW - 0.5))
    assert fault is not None
    assert fault.provisional


def test_a_dead_launcher_is_the_root_of_its_ranks_deaths() -> None:
    """Both by the agent's word and by the container's state."""
    ranks = [_dead(2, signal=9), _dead(3, signal=9)]
    reports = [build.report(JOB, 0), build.report(JOB, 1, launcher=False, ranks=tuple(ranks))]
    fault = faults.find(build.observe(JOB, build.status(), reports))
    assert fault is not None
    assert (fault.kind, fault.worker) == (FaultKind.LAUNCHER_LOST, 1)
    seen = build.job_with(JOB)
    views = (seen.workers[0], dataclasses.replace(seen.workers[1], containers={TRAINER: DEAD}))
    fault = faults.find(build.changed(seen, workers=views))
    assert fault is not None
    assert fault.kind is FaultKind.LAUNCHER_LOST


def test_fatal_notice_and_missing_command() -> None:
    """Nothing that a restart would heal."""
    notice = Notice(code="wrong-model", text="the checkpoint has 3 layers, the model 4", rank=0, fatal=True)
    fault = faults.find(build.job_with(JOB, notices=(notice,)))
    assert fault is not None
    assert (fault.kind, fault.message) == (FaultKind.FATAL, notice.text)
    fault = faults.find(build.job_with(JOB, launcher_error="pythn: not found"))
    assert fault is not None
    assert fault.kind is FaultKind.FATAL


@pytest.mark.parametrize(("code", "reason"), [("wrapped", "Wrapped"), ("cold-starts", "NotForked")])
def test_a_cold_start_is_a_condition_and_no_fault(code: str, reason: str) -> None:
    """With the words of whoever knows why."""
    seen = build.job_with(JOB, notices=(Notice(code=code, text="run as it is"),))
    assert faults.find(seen) is None
    status = decide.decide(seen).status
    (condition,) = [item for item in status.conditions if item.type == "WarmStart"]
    assert (condition.status, condition.reason, condition.message) == (False, reason, "run as it is")
    plain = decide.decide(build.job_with(JOB)).status.conditions
    assert "WarmStart" not in {item.type for item in plain}


def test_a_worker_that_cannot_get_the_state() -> None:
    """The source is what failed."""
    fault = faults.find(build.job_with(JOB, prepared=Prepared(attempt=1, ok=False, error="block 3 is damaged")))
    assert fault is not None
    assert fault.kind is FaultKind.RESTORE_FAILED


PHASES = [("startup", 600.0), ("restore", 600.0), ("first_step", 600.0), ("training", 30.0), ("save", 600.0),
          ("evaluate", 3600.0), (None, 3600.0), ("warmup", 3600.0)]  # fmt: skip


@pytest.mark.parametrize(("phase", "limit"), PHASES)
def test_each_phase_has_its_deadline_O_04(phase: str | None, limit: float) -> None:
    """Just before it nothing, just after it a hang; an unknown or unreadable phase has the longest, never none."""
    for quiet, hangs in ((limit - 1, False), (limit + 1, True)):
        ranks = [build.rank(n, phase=phase, quiet_seconds=quiet) for n in range(4)]
        fault = faults.find(build.job_with(JOB, *ranks))
        assert (fault is not None and fault.kind is FaultKind.HANG) == hangs


def test_a_declared_timeout_is_taken_O_04() -> None:
    """`phase("evaluate", timeout=20)`."""
    rank = build.rank(0, phase="evaluate", phase_timeout_seconds=20.0, quiet_seconds=25.0)
    waiting = [build.rank(n, quiet_seconds=25.0) for n in (1, 2, 3)]
    assert faults.find(build.job_with(JOB, rank, *waiting)) is not None
    patient = dataclasses.replace(rank, phase_timeout_seconds=200.0)
    assert faults.find(build.job_with(JOB, patient, *[build.rank(n, quiet_seconds=100.0) for n in (1, 2, 3)])) is None


def test_the_training_deadline_is_learned_O_03() -> None:
    """Ten times a step of 20 s."""
    for quiet, hangs in ((190.0, False), (201.0, True)):
        ranks = [build.rank(n, step_seconds=20.0, quiet_seconds=quiet) for n in range(4)]
        assert (faults.find(build.job_with(JOB, *ranks)) is not None) == hangs


def test_ranks_are_not_late_for_what_somebody_else_just_finished_O_04() -> None:
    """Rank 0 has just come back from a long evaluation; the others waited for it."""
    ranks = [build.rank(0, quiet_seconds=0.1), *(build.rank(n, quiet_seconds=500.0) for n in (1, 2, 3))]
    assert faults.find(build.job_with(JOB, *ranks)) is None


def test_a_rank_that_stays_behind_while_others_move_is_late_O_03() -> None:
    """The others' progress is no excuse."""
    ranks = [build.rank(0, step=9, quiet_seconds=40.0), *(build.rank(n, step=11, quiet_seconds=0.1) for n in (1, 2, 3))]
    fault = faults.find(build.job_with(JOB, *ranks))
    assert fault is not None
    assert (fault.kind, fault.rank) == (FaultKind.HANG, 0)


def _stack(**fields: object) -> StackReport:
    return StackReport(**({"responsive": True, "process_state": "S", "in_collective": True} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "culprit", "infrastructure"),
    [
        pytest.param({2: {"stack": _stack(responsive=False, process_state="T")}}, 2, True, id="stopped"),
        pytest.param({2: {"stack": _stack(responsive=False)}}, 2, True, id="unresponsive"),
        pytest.param({1: {"step": 9}}, 1, False, id="a step behind"),
        pytest.param({3: {"stack": _stack(in_collective=False)}}, 3, False, id="not in the collective"),
        pytest.param({1: {"step": 9}, 2: {"stack": _stack(process_state="T")}}, 2, True, id="stopped before behind"),
        pytest.param({}, None, False, id="nobody stands out"),
    ],
)
def test_the_culprit_of_a_hang_O_03(
    changes: dict[int, dict[str, object]], culprit: int | None, infrastructure: bool
) -> None:
    """From the stacks and steps of all ranks."""
    ranks = [build.rank(n, **({"quiet_seconds": 40.0, "stack": _stack()} | changes.get(n, {}))) for n in range(4)]
    fault = faults.find(build.job_with(JOB, *ranks))
    assert fault is not None
    assert (fault.rank, fault.infrastructure) == (culprit, infrastructure)


def _silent(quiet: float, *, started: float = 0.0, both: bool = False) -> dict[str, float]:
    reports = [None if both else build.report(JOB, 0, ranks=tuple(build.rank(n, quiet_seconds=quiet) for n in (0, 1))),
               None]  # fmt: skip
    seen = build.observe(JOB, build.status(), reports, coordinator_started_at=started)
    views = tuple(dataclasses.replace(v, silent_seconds=0.0 if v.connected else 15.0) for v in seen.workers)
    return faults.suspicions(build.changed(seen, workers=views))


def test_silence_counts_only_when_the_steps_stopped_too() -> None:
    """And not for a coordinator that has just started, and never for all workers at once."""
    assert "silent-1" in _silent(quiet=12.0)
    assert "silent-1" not in _silent(quiet=1.0)
    assert "silent-1" not in _silent(quiet=12.0, started=build.NOW - 5)
    assert not _silent(quiet=12.0, both=True)


def test_an_agent_that_keeps_its_connection_and_says_nothing_is_silent_too() -> None:
    """A stopped agent process; what it last said of its ranks is no ground for a judgement while the others move."""
    seen = build.job_with(JOB, *(build.rank(n, quiet_seconds=q) for n, q in ((0, 12.0), (1, 12.0), (2, 0.1), (3, 0.1))))
    mute = dataclasses.replace(seen.workers[1], silent_seconds=15.0)
    seen = build.changed(seen, workers=(seen.workers[0], mute))
    assert "silent-1" in faults.suspicions(seen)
    stale = build.job_with(JOB, *(build.rank(n, quiet_seconds=100.0) for n in (2, 3)))
    stale = build.changed(stale, workers=(stale.workers[0], dataclasses.replace(stale.workers[1], silent_seconds=5.0)))
    assert faults.find(stale) is None
    assert "silent-1" not in faults.suspicions(stale)


def test_a_hang_is_not_judged_while_a_worker_cannot_be_heard() -> None:
    """It is judged as silent, or comes back."""
    reports = [build.report(JOB, 0, ranks=tuple(build.rank(n, quiet_seconds=100.0) for n in (0, 1))), None]
    seen = build.observe(JOB, build.status(), reports, coordinator_started_at=build.NOW - 1)
    assert faults.find(seen) is None


def test_another_incarnation_in_a_workers_place_is_a_lost_worker() -> None:
    """Its memory is gone."""
    known = build.status(incarnations={0: "w0", 1: "older"})
    fault = faults.find(build.job_with(JOB, status_=known))
    assert fault is not None
    assert (fault.kind, fault.worker) == (FaultKind.WORKER_LOST, 1)


def test_deadlines_are_the_jobs_own() -> None:
    """A floor of 5 s."""
    job = build.spec(deadlines=Deadlines(training_floor=5.0, training_factor=2.0))
    assert faults.find(build.job_with(job, *(build.rank(n, quiet_seconds=6.0) for n in range(4)))) is not None
