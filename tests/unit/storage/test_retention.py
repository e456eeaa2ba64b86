"""O-15: what retention may remove, over all sequences of saves, failures, crashes and restores."""

from __future__ import annotations

import pathlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastwords.protocol.manifest import MANIFEST, CheckpointId
from lastwords.protocol.messages import CheckpointInfo
from lastwords.storage import retention
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.posix import PosixStore
from lastwords.storage.retention import Keep
from tests.unit.storage import support
from tests.unit.storage.conftest import Fresh

IDS = st.builds(
    CheckpointId, step=st.sampled_from([1, 9, 10, 99, 100, 999, 1000, 9_900, 10_000]), attempt=st.integers(1, 4)
)
INFOS = st.builds(
    CheckpointInfo, id=IDS, finite=st.booleans(), rejected=st.sampled_from(["", "", "block 1 is damaged"])
)


def good(infos: list[CheckpointInfo]) -> list[CheckpointId]:
    return sorted((i.id for i in infos if i.finite and not i.rejected), key=retention.age)


@given(st.lists(INFOS, unique_by=lambda info: info.id), st.integers(1, 3), st.sets(IDS))
def test_O_15_the_newest_good_ones_and_those_in_use_are_never_chosen(
    infos: list[CheckpointInfo], keep_last: int, in_use: set[CheckpointId]
) -> None:
    gone = retention.choose_deletions(infos, Keep(last=keep_last), in_use)
    left = [info for info in infos if info.id not in gone]
    assert set(gone) <= {info.id for info in infos}
    assert not set(gone) & in_use
    assert good(left)[-keep_last:] == good(infos)[-keep_last:]
    # No more than wanted is kept either.
    extra = set(good(left)) - set(good(infos)[-keep_last:])
    assert extra <= in_use
    assert retention.choose_deletions(left, Keep(last=keep_last), in_use) == (), "a second time there is nothing to do"


@given(st.lists(INFOS, unique_by=lambda info: info.id), st.integers(1, 3))
def test_O_16_bad_ones_push_nothing_out_and_go_when_they_are_old(infos: list[CheckpointInfo], keep_last: int) -> None:
    gone = set(retention.choose_deletions(infos, Keep(last=keep_last), ()))
    only_good = [info for info in infos if info.finite and not info.rejected]
    assert gone & set(good(infos)) == set(retention.choose_deletions(only_good, Keep(last=keep_last), ()))
    if good(infos):
        oldest = retention.age(good(infos)[-keep_last:][0])
        assert not [i.id for i in infos if retention.age(i.id) < oldest and i.id not in gone]


def test_O_15_order_is_that_of_numbers_and_of_attempts() -> None:
    def info(step: int, attempt: int = 1) -> CheckpointInfo:
        return CheckpointInfo(id=support.identify(step, attempt))

    assert retention.choose_deletions([info(9_900), info(10_000)], Keep(last=1), ()) == (support.identify(9_900),)
    # Attempt 2 went on from step 50 of attempt 1: its step 60 is what the job has come to.
    assert retention.choose_deletions([info(100, 1), info(60, 2)], Keep(last=1), ()) == (support.identify(100, 1),)
    assert retention.choose_deletions([info(1)], Keep(last=0), ()) == (), "one is always kept"


@given(st.lists(INFOS, unique_by=lambda info: info.id), st.integers(1, 3), st.sampled_from([1, 7, 100, 1000]))
def test_keep_every_keeps_one_good_one_of_every_so_many_steps_for_good(
    infos: list[CheckpointInfo], last: int, every: int
) -> None:
    gone = set(retention.choose_deletions(infos, Keep(last=last, every=every), ()))
    assert gone <= set(retention.choose_deletions(infos, Keep(last=last), ())), "it only ever keeps more"
    left = [i for i in good(infos) if i not in gone]
    for number in {i.step // every for i in good(infos)} - {0}:
        there = [i for i in good(infos) if i.step // every == number]
        newest = max(i.attempt for i in there)
        assert min(i for i in there if i.attempt == newest) in left
    new = good(infos)[-last:]
    assert len(set(left) - set(new)) <= len({i.step // every for i in left}), "and no more than one for each"
    assert not retention.choose_deletions([i for i in infos if i.id not in gone], Keep(last=last, every=every), ())


def test_keep_every_as_saves_go_by() -> None:
    kept: list[CheckpointInfo] = []
    for step in range(30, 1000, 70):
        kept.append(CheckpointInfo(id=support.identify(step)))
        gone = retention.choose_deletions(kept, Keep(last=2, every=300), ())
        kept = [info for info in kept if info.id not in gone]
    assert [info.id.step for info in kept] == [310, 660, 870, 940]


def test_remains_go_only_when_a_newer_one_is_committed_and_nobody_writes_them() -> None:
    ids = [support.identify(step) for step in (5, 10, 15, 20)]
    assert retention.choose_remains(ids, [], ()) == ()
    assert retention.choose_remains(ids, [support.identify(12)], ()) == (ids[0], ids[1])
    assert retention.choose_remains(ids, [support.identify(12)], {ids[1]}) == (ids[0],)


class Crash(BaseException):
    """In the middle of something."""


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "broken save", "crash", "restart"]), st.integers(1, 60)), min_size=1, max_size=12
)


@given(actions=ACTIONS, keep_last=st.integers(1, 3), start=st.sampled_from([1, 8, 95, 996, 9_990]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_O_15_whatever_happens_the_newest_good_checkpoint_is_there(
    actions: list[tuple[str, int]], keep_last: int, start: int, fresh: Fresh
) -> None:
    folder = fresh.folder()
    left = 0

    def on_step(_: str) -> None:
        nonlocal left
        if left:
            left -= 1
            if left == 0:
                raise Crash

    job = JobCheckpoints(PosixStore(folder, on_step), "ns", "job")
    step, attempt, newest = start, 1, None
    for action, number in actions:
        step += 1
        left = number if action == "crash" else 0
        try:
            if action == "restart":
                attempt += 1
            elif action == "broken save":
                support.write(job, support.plan(step, attempt), ranks=(0,))
            else:
                newest = support.save(job, step, attempt).id
                job.retain(Keep(last=keep_last), ())
        except Crash:
            pass
        left = 0
        found = [info.id for info in job.list_checkpoints() if not info.rejected]
        if newest is not None:
            assert found
            assert retention.age(max(found, key=retention.age)) >= retention.age(newest)
            newest = max(found, key=retention.age)
            assert job.verify(newest) == []
    assert newest is None or job.verify(newest) == []


def test_a_delete_that_is_interrupted_leaves_no_half_checkpoint(tmp_path: pathlib.Path) -> None:
    count = 0
    support.save(support.at(tmp_path / "count"))

    def counting(_: str) -> None:
        nonlocal count
        count += 1

    JobCheckpoints(PosixStore(tmp_path / "count", counting), "ns", "job").delete(support.identify(10))
    for stop_at in range(1, count + 1):
        folder = tmp_path / str(stop_at)
        support.save(support.at(folder))
        left = stop_at

        def on_step(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash

        try:
            JobCheckpoints(PosixStore(folder, on_step), "ns", "job").delete(support.identify(10))
        except Crash:
            pass
        job = support.at(folder)
        assert job.list_checkpoints() == []
        assert not (folder / "ns/job" / support.identify(10).folder / MANIFEST).exists()
        support.save(job, step=20)
        job.retain(Keep(last=3), ())
        assert job.list_folders() == [support.identify(20)], "the remains are cleaned up"
