"""Which step is kept at a fault, who waits for whom, and when one update is allowed."""

from __future__ import annotations

import dataclasses

from lastwords.protocol.messages import ExitReport, RankReport, RankState, RestoreSource, StackReport
from lastwords_operator.core import lastwords
from lastwords_operator.core.model import Fault, FaultKind, JobState, LastWords
from lastwords_operator.core.observation import Observation
from tests.unit.core import build

JOB = build.spec(workers=1, procs=4)
KILL = Fault(kind=FaultKind.RANK_KILLED, message="killed", infrastructure=True)
DEAD = {"state": RankState.EXITED, "exit": ExitReport(signal=9)}


def _words(**fields: object) -> LastWords:
    values = {"fault": KILL, "began_at": build.NOW, "deadline": build.NOW + 60, "hold_deadline": build.NOW + 5}
    return LastWords(**(values | fields))  # type: ignore[arg-type]


def _seen(*ranks: RankReport, records: object = None, parts: object = (), now: float = build.NOW) -> Observation:
    rows = records if records is not None else [build.record(n, s) for n in range(4) for s in (9, 10)]
    seen = build.job_with(JOB, *ranks, status_=build.status(JobState.LAST_WORDS), records=tuple(rows), parts=parts)  # type: ignore[arg-type]
    return build.changed(seen, now=now)


def _held(number: int, **fields: object) -> RankReport:
    return build.rank(number, held=True, **fields)


def test_it_waits_for_those_who_are_believed_alive_but_not_for_ever() -> None:
    """Rank 2 has not acknowledged; after the hold's deadline the others are enough."""
    ranks = [_held(0), build.rank(1, **DEAD), build.rank(2), _held(3)]
    assert isinstance(lastwords.next_step(_seen(*ranks), _words()), lastwords.Wait)
    step = lastwords.next_step(_seen(*ranks, now=build.NOW + 5), _words(newest_step=10))
    assert isinstance(step, lastwords.CopyParts)
    assert set(step.writers.values()) <= {0, 3}


def test_a_stopped_process_is_not_waited_for_and_copies_nothing() -> None:
    """Its stack said so."""
    frozen = build.rank(2, stack=StackReport(responsive=False, process_state="T"))
    step = lastwords.next_step(_seen(_held(0), _held(1), frozen, _held(3)), _words(newest_step=10))
    assert isinstance(step, lastwords.CopyParts)
    assert sorted(step.writers) == [0, 1, 2, 3]
    assert 2 not in step.writers.values()


def test_a_rank_in_its_update_is_no_source() -> None:
    """Odd after the deadline: its memory is neither step."""
    ranks = [_held(0), build.rank(1, **DEAD), _held(2, odd=True), _held(3)]
    step = lastwords.next_step(_seen(*ranks, now=build.NOW + 5), _words(newest_step=10))
    assert isinstance(step, lastwords.CopyParts)
    assert set(step.writers.values()) <= {0, 3}


def test_everybody_in_mid_update_is_refused_with_the_reason() -> None:
    """Then the next best source is taken: the ready parts of step 9."""
    ranks = [_held(n, odd=True) for n in range(4)]
    parts = tuple(build.part(n, 9) for n in range(4))
    step = lastwords.next_step(_seen(*ranks, parts=parts, now=build.NOW + 5), _words(newest_step=10))
    assert isinstance(step, lastwords.Keep)
    assert step.choice.source is not None
    assert (step.choice.source.source, step.choice.source.step) == (RestoreSource.MEMORY, 9)


def test_ready_parts_of_the_newest_step_need_no_copy() -> None:
    """The snapshot is there already."""
    parts = tuple(build.part(n, 10) for n in range(4))
    ranks = [_held(0), build.rank(1, **DEAD), _held(2), _held(3)]
    assert isinstance(lastwords.next_step(_seen(*ranks, parts=parts), _words(newest_step=10)), lastwords.Keep)


def test_one_update_is_allowed_when_it_makes_the_newest_step_whole_O_14() -> None:
    """
    Rank 1 passed step 10 and died, the others wait at their gates with its gradients: without the update step 10 is
    lost. Nobody is released when the newest step is whole already.
    """
    dead = build.rank(1, step=10, **DEAD)
    gate = [_held(n, step=9, at_gate=True) for n in (0, 2, 3)]
    rows = [build.record(n, 9) for n in range(4)] + [build.record(1, 10)]
    rows += [build.record(n, 10, provisional=True) for n in (0, 2, 3)]
    step = lastwords.next_step(_seen(gate[0], dead, *gate[1:], records=rows), _words(newest_step=10))
    assert step == lastwords.Release(step=10)
    behind = _held(2, step=9, at_gate=True)
    step = lastwords.next_step(_seen(_held(0), dead, behind, _held(3), records=rows), _words(newest_step=10))
    assert isinstance(step, lastwords.CopyParts)
    assert step.step == 10


def test_a_rank_may_still_reach_its_gate_for_a_second() -> None:
    """Its record of the newest step is written there."""
    ranks = [_held(0), build.rank(1, **DEAD), _held(2, step=9), _held(3)]
    rows = [build.record(n, 10) for n in (0, 1, 3)] + [build.record(n, 9) for n in range(4)]
    seen = _seen(*ranks, records=rows)
    assert isinstance(lastwords.next_step(seen, _words(newest_step=10)), lastwords.Wait)
    late = build.changed(seen, now=build.NOW + 1.5)
    step = lastwords.next_step(late, _words(newest_step=10))
    assert step == lastwords.CopyParts(step=9, writers={0: 2, 1: 2, 2: 2, 3: 2})


def test_a_script_that_ended_with_an_exception_still_gives_its_state_O_09() -> None:
    """It needs no hold; in mid-update it is no source."""
    ended = {"state": RankState.ERRORED, "exit": ExitReport(exception="ValueError")}
    step = lastwords.next_step(_seen(*(build.rank(n, **ended) for n in range(4))), _words(newest_step=10))
    assert isinstance(step, lastwords.CopyParts)
    assert step.writers == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_failed_copy_is_not_tried_again() -> None:
    """The next best is kept."""
    parts = tuple(build.part(n, 9) for n in range(4))
    ranks = [_held(0), build.rank(1, **DEAD), _held(2), _held(3)]
    step = lastwords.next_step(_seen(*ranks, parts=parts), _words(newest_step=10, tried=(10,)))
    assert isinstance(step, lastwords.Keep)
    assert step.choice.source is not None
    assert step.choice.source.step == 9


def test_last_words_end_at_their_deadline() -> None:
    """Whatever is missing then."""
    seen = _seen(*(build.rank(n) for n in range(4)), now=build.NOW + 60)
    assert isinstance(lastwords.next_step(seen, _words()), lastwords.Keep)


def test_disabled_last_words_wait_for_nobody() -> None:
    """mode: Disabled."""
    seen = _seen(*(build.rank(n) for n in range(4)))
    seen = build.changed(seen, spec=dataclasses.replace(JOB, last_words=False))
    assert isinstance(lastwords.next_step(seen, _words()), lastwords.Keep)
