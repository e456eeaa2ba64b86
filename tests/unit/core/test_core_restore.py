"""What an attempt starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.protocol import codec, lineage
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.messages import AgentReport, PartHolding, RecordHolding, RestoreSource, RunState, StorageReport
from lastwords.storage import retention
from lastwords_operator.core import decide, orders, restore
from lastwords_operator.core.model import Excluded, HoldRelease, JobState, JobStatus
from lastwords_operator.core.observation import Observation
from tests.unit.core import build

JOB = build.spec()


def _holding(
    steps: dict[int, list[int]],
    stored: Sequence[object] = (),
    records: list[RecordHolding] | None = None,
    **fields: object,
) -> list[AgentReport | None]:
    """Workers that hold ready parts and records of these steps: step -> ranks."""
    reports: list[AgentReport | None] = []
    for worker in range(JOB.workers):
        own = JOB.topology.ranks_of(worker)
        parts = tuple(build.part(n, step) for step, ranks in steps.items() for n in ranks if n in own)
        kept = records if records is not None else [build.record(n, step) for step in steps for n in range(4)]
        mine = tuple(row for row in kept if row.rank in own)
        storage = StorageReport(loaded=True, checkpoints=tuple(stored))  # type: ignore[arg-type]
        reports.append(build.report(JOB, worker, parts=parts, records=mine, storage=storage, ranks=(), **fields))
    return reports


def _choose(reports: list[AgentReport | None], status: JobStatus | None = None) -> restore.Choice:
    return restore.choose(build.observe(JOB, status or build.status(JobState.GATHERING), reports))


def test_memory_before_storage_at_equal_steps() -> None:
    """Faster; and the newer of both otherwise."""
    plan = _choose(_holding({10: [0, 1, 2, 3]}, [build.checkpoint(10)])).plan
    assert plan is not None
    assert plan.source is RestoreSource.MEMORY
    plan = _choose(_holding({10: [0, 1, 2, 3]}, [build.checkpoint(12)])).plan
    assert plan is not None
    assert (plan.source, plan.step) == (RestoreSource.CHECKPOINT, 12)


def test_one_step_for_all_ranks_O_14() -> None:
    """A newer step that one worker lacks in part and nobody else can give is not chosen."""
    plan = _choose(_holding({10: [0, 1, 2, 3], 12: [0, 2]})).plan
    assert plan is not None
    assert plan.step == 10
    plan = _choose(_holding({10: [0, 1, 2, 3], 12: [0, 1]})).plan
    assert plan is not None
    assert (plan.step, plan.parts) == (12, {0: 0, 1: 0, 2: 0, 3: 0})


def test_non_finite_states_are_no_candidates_O_16() -> None:
    """Neither in memory nor in storage."""
    reports = _holding({10: [0, 1, 2, 3]}, [build.checkpoint(9, finite=False), build.checkpoint(8)])
    spoiled = [
        dataclasses.replace(report, parts=tuple(dataclasses.replace(p, finite=False) for p in report.parts))
        for report in reports if report is not None
    ]  # fmt: skip
    choice = _choose(list(spoiled))
    assert choice.plan is not None
    assert (choice.plan.source, choice.plan.step) == (RestoreSource.CHECKPOINT, 8)
    assert sum("NaN" in reason for reason in choice.rejected) == 2


def test_never_from_zero_without_permission_O_17() -> None:
    """A start needs none as long as nothing was ever saved; what was saved and cannot be used does."""
    empty = _holding({})
    fresh = JobStatus(state=JobState.GATHERING)
    plan = _choose(empty, fresh).plan
    assert plan is not None
    assert plan.source is RestoreSource.BEGINNING
    made_steps = dataclasses.replace(build.status(JobState.GATHERING), was_saved=False)
    plan = _choose(empty, made_steps).plan
    assert plan is not None, "there is nothing that could be brought back"
    assert plan.source is RestoreSource.BEGINNING
    had_saved = dataclasses.replace(made_steps, was_saved=True)
    assert _choose(empty, had_saved).plan is None
    choice = _choose(_holding({}, [build.checkpoint(5, rejected="torn")]), fresh)
    assert choice.plan is None
    assert choice.rejected == ("checkpoint of step 5, attempt 1: torn",)
    permitted = build.observe(dataclasses.replace(JOB, allow_beginning=True), had_saved, empty)
    assert restore.choose(permitted).plan is not None


@pytest.mark.parametrize(("ranks", "saved"), [([0, 1, 2, 3], True), ([0, 1], True), ([0, 2], False), ([], False)])
def test_the_job_remembers_that_a_whole_state_has_stood_in_memory_O_17(ranks: list[int], saved: bool) -> None:
    """One worker's two parts are a whole copy; parts that leave something out are not."""
    seen = build.observe(JOB, build.status(JobState.GATHERING, was_saved=False), _holding({10: ranks}))
    assert decide.decide(seen).status.was_saved is saved


def test_records_of_all_ranks_are_preferred_and_their_lack_is_said() -> None:
    """An older exact step before a newer one with a reseeded rank; only where there is none, that one."""
    records = [build.record(n, 10) for n in range(4)] + [build.record(n, 12) for n in range(3)]
    plan = _choose(_holding({10: [0, 1, 2, 3], 12: [0, 1, 2, 3]}, records=records)).plan
    assert plan is not None
    assert (plan.step, plan.exact) == (10, True)
    plan = _choose(_holding({12: [0, 1, 2, 3]}, records=records)).plan
    assert plan is not None
    assert (plan.step, plan.exact, sorted(plan.records)) == (12, False, [0, 1, 2])


def test_a_step_with_provisional_records_only_is_none() -> None:
    """Somebody must have what all ranks share."""
    provisional = [build.record(n, 10, provisional=True) for n in range(4)]
    had_saved = dataclasses.replace(build.status(JobState.GATHERING), was_saved=True)
    assert _choose(_holding({10: [0, 1, 2, 3]}, records=provisional), had_saved).plan is None
    mixed = [*provisional[:3], build.record(3, 10)]
    assert _choose(_holding({10: [0, 1, 2, 3]}, records=mixed)).plan is not None


def test_records_come_from_a_neighbour_when_their_own_worker_has_none() -> None:
    """The lost worker's ranks are restored bit-equal."""
    lost = build.report(JOB, 1, parts=(), records=(), ranks=(), table=None)
    kept = build.report(
        JOB, 0, ranks=(), parts=tuple(build.part(n, 10) for n in (0, 1)),
        records=tuple(build.record(n, 10, neighbour=n > 1) for n in range(4)),
    )  # fmt: skip
    plan = _choose([kept, lost]).plan
    assert plan is not None
    assert (plan.exact, plan.records) == (True, {0: 0, 1: 0, 2: 0, 3: 0})


def test_checkpoints_fit_other_numbers_of_workers_and_memory_does_not() -> None:
    """The table of two workers says nothing about three."""
    job = build.spec(workers=3)
    reports = [*_holding({10: [0, 1, 2, 3]}, [build.checkpoint(8)]), build.report(job, 2, table=None, ranks=())]
    plan = restore.choose(build.observe(job, build.status(JobState.GATHERING), reports)).plan
    assert plan is not None
    assert (plan.source, plan.step) == (RestoreSource.CHECKPOINT, 8)


def test_a_state_off_the_path_is_no_source() -> None:
    """Attempt 2 went on from step 5; step 8 of attempt 1 belongs to a path that was left."""
    known = build.status(JobState.GATHERING, attempt=2, lineage=(LineageEntry(1, 0, 0), LineageEntry(2, 5, 1)))
    choice = _choose(_holding({}, [build.checkpoint(8, 1), build.checkpoint(6, 2), build.checkpoint(4, 1)]), known)
    assert choice.plan is not None
    assert (choice.plan.step, choice.plan.attempt) == (6, 2)
    assert any("not on the path" in reason for reason in choice.rejected)


def test_a_state_in_memory_off_the_path_is_no_source() -> None:
    """A worker that was away still holds step 12 of attempt 1, which attempt 2 left at step 5."""
    known = build.status(JobState.GATHERING, attempt=2, lineage=(LineageEntry(1, 0, 0), LineageEntry(2, 5, 1)))
    choice = _choose(_holding({12: [0, 1, 2, 3], 5: [0, 1, 2, 3]}), known)
    assert choice.plan is not None
    assert (choice.plan.source, choice.plan.step, choice.plan.attempt) == (RestoreSource.MEMORY, 5, 1)


def test_without_a_history_the_highest_attempt_counts() -> None:
    """Its lower step is newer than the higher one of a path that was left."""
    plan = _choose(_holding({}, [build.checkpoint(100, 1), build.checkpoint(60, 2)]), JobStatus()).plan
    assert plan is not None
    assert (plan.step, plan.attempt) == (60, 2)


def test_the_next_attempt_is_above_everything_found_O_14() -> None:
    """In memory, records and storage."""
    reports = _holding({}, [build.checkpoint(3, 7)], attempt=2)
    assert restore.highest_attempt(build.observe(JOB, build.status(), reports)) == 7
    decision = decide.decide(build.observe(JOB, JobStatus(), [_stopped(report, 0) for report in reports]))
    again = decide.decide(build.observe(JOB, decision.status, [_stopped(report, 1) for report in reports]))
    assert again.status.attempt == 8


def _stopped(report: AgentReport | None, order: int) -> AgentReport:
    assert report is not None
    return dataclasses.replace(report, run=RunState.STOPPED, order_seen=order)


def test_a_source_that_could_not_be_read_is_given_up_O_12() -> None:
    """A checkpoint after one failure, memory after two: another worker may still have the part."""
    stored = _holding({}, [build.checkpoint(8), build.checkpoint(6)])
    row = Excluded(source=RestoreSource.CHECKPOINT, step=8, attempt=1, reason="block 3 is damaged")
    plan = _choose(stored, build.status(JobState.GATHERING, excluded=(row,))).plan
    assert plan is not None
    assert plan.step == 6
    row = Excluded(source=RestoreSource.MEMORY, step=10, attempt=1, reason="gone")
    memory = _holding({10: [0, 1, 2, 3]}, [build.checkpoint(8)])
    for rows, step in (((row,), 10), ((row, row), 8)):
        plan = _choose(memory, build.status(JobState.GATHERING, excluded=rows)).plan
        assert plan is not None
        assert plan.step == step


_STATES = st.sampled_from([(1, 1), (2, 1), (4, 1), (3, 2), (5, 2), (4, 3), (6, 3)])
_PARTS = st.builds(
    lambda n, state, finite: build.part(n, *state, finite=finite),
    st.integers(0, 3), _STATES, st.integers(0, 9).map(lambda n: n > 0),
)  # fmt: skip
_RECORDS = st.builds(
    lambda n, state, p: build.record(n, *state, provisional=p), st.integers(0, 3), _STATES, st.booleans()
)
_STORED = st.builds(
    lambda step, attempt, finite, bad: build.checkpoint(step, attempt, finite=finite, rejected="torn" if bad else ""),
    st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans(),
)  # fmt: skip


@given(st.lists(_PARTS, max_size=40), st.lists(_RECORDS, max_size=40), st.lists(_STORED, max_size=5), st.integers(0, 6))
def test_whatever_is_chosen_is_whole_finite_and_on_the_path(
    parts: list[PartHolding], records: list[RecordHolding], stored: list[object], left_at: int
) -> None:
    """For any inventory."""
    known = build.status(
        JobState.GATHERING, attempt=3, was_saved=True,
        lineage=(LineageEntry(1, 0, 0), LineageEntry(2, left_at, 1), LineageEntry(3, max(left_at - 1, 0), 1)),
    )  # fmt: skip
    reports: list[AgentReport | None] = [
        build.report(
            JOB, w, ranks=(), parts=tuple(p for p in parts if p.rank in JOB.topology.ranks_of(w)),
            records=tuple(r for r in records if r.rank in JOB.topology.ranks_of(w)),
            storage=StorageReport(loaded=True, checkpoints=tuple(stored)),  # type: ignore[arg-type]
        )
        for w in range(2)
    ]  # fmt: skip
    plan = _choose(reports, known).plan
    if plan is None:
        return
    assert lineage.is_valid_source(known.lineage, plan.step, plan.attempt)
    key = (plan.step, plan.attempt)
    if plan.source is RestoreSource.MEMORY:
        mine = [p for p in parts if (p.step, p.attempt) == key]
        assert all(p.finite for p in mine)
        # With DDP the parts of equal local ranks are the same: a worker serves what its own part of that place has.
        for number, worker in plan.parts.items():
            assert any(p.rank == worker * 2 + number % 2 for p in mine)
        final = [r for r in records if (r.step, r.attempt) == key and not r.provisional]
        assert final
        assert plan.exact == (set(plan.records) == {0, 1, 2, 3})
    else:
        assert plan.source is RestoreSource.CHECKPOINT


@given(st.lists(_STORED, min_size=1, max_size=8), st.integers(1, 3))
def test_a_checkpoint_in_use_is_never_deleted(stored: list[object], keep: int) -> None:
    """What an attempt starts from is named in the orders until all ranks have made a new step."""
    seen = build.observe(JOB, JobStatus(), [_stopped(report, 0) for report in _holding({}, stored)])
    first = decide.decide(seen)
    started = decide.decide(build.observe(JOB, first.status, [_stopped(report, 1) for report in _holding({}, stored)]))
    if started.status.restore is None or started.status.restore.source is not RestoreSource.CHECKPOINT:
        return
    used = started.orders[0].in_use
    assert [(item.step, item.attempt) for item in used] == [
        (started.status.restore.step, started.status.restore.attempt)
    ]
    assert not set(used) & set(retention.choose_deletions(stored, retention.Keep(last=keep), used))  # type: ignore[arg-type]


def test_the_number_of_orders_grows_only_with_their_content() -> None:
    """The same observation gives the same number, a new fetch address a new one; the status survives its text."""
    seen: Observation = build.job_with(JOB)
    status, first = orders.build(seen)
    again, second = orders.build(build.changed(seen, status=status))
    assert (again, second) == (status, first)
    moved = build.job_with(JOB, status_=status, fetch_address="10.9.9.9:1")
    later, _ = orders.build(moved)
    assert later.order_number == status.order_number + 1
    assert codec.loads(JobStatus, codec.dumps(later)) == later


def test_a_release_is_for_the_agent_process_that_held() -> None:
    """A new agent counts from the start: its first hold is not the one that is over."""
    release = {1: HoldRelease(agent_run="a1", count=3)}
    _, made = orders.build(build.job_with(JOB, status_=build.status(releases=release)))
    assert (made[0].release_hold, made[1].release_hold) == (0, 3)
    reports = [build.report(JOB, 0), dataclasses.replace(build.report(JOB, 1), agent_run="a1-again")]
    _, made = orders.build(build.observe(JOB, build.status(releases=release), reports))
    assert made[1].release_hold == 0


@pytest.mark.parametrize("epoch", [1, 7])
def test_orders_carry_the_coordinators_epoch(epoch: int) -> None:
    """A new coordinator's are above all of an older one."""
    _, made = orders.build(build.changed(build.job_with(JOB), epoch=epoch))
    assert {order.epoch for order in made.values()} == {epoch}
