"""Budget, rules, back-off, the same error again, failing before the first step."""

from __future__ import annotations

import dataclasses

import pytest

from lastwords_operator.core import policy
from lastwords_operator.core.model import FailurePolicy, FailureRule, Fault, FaultKind, JobStatus, RuleAction

KILL = Fault(kind=FaultKind.RANK_KILLED, message="killed", infrastructure=True, exit_code=137, step=5)
ERROR = Fault(
    kind=FaultKind.USER_EXCEPTION, message="Rank 0 raised ValueError: no (at step 5)", infrastructure=False,
    exit_code=1, exception="builtins.ValueError", error="no", step=5,
)  # fmt: skip


def _run(rules: FailurePolicy, faults: list[Fault], *, progress: bool = True) -> tuple[JobStatus, str]:
    status = JobStatus()
    for fault in faults:
        verdict = policy.judge(rules, status, fault, 0.0)
        if verdict.fail:
            return verdict.status, verdict.fail
        status = policy.with_progress(verdict.status) if progress else verdict.status
    return status, ""


def test_infrastructure_faults_cost_no_budget_O_20() -> None:
    """A hundred of them with progress between."""
    status, fail = _run(FailurePolicy(max_restarts=2), [KILL] * 100)
    assert not fail
    assert (status.restarts, status.infrastructure_restarts) == (0, 100)


@pytest.mark.parametrize("fault", [KILL, ERROR], ids=["killed", "error"])
def test_exactly_max_restarts_and_then_failure_O_19(fault: Fault) -> None:
    """Without a new step between them, whatever the cause."""
    faults = [dataclasses.replace(fault, step=n, error=str(n)) for n in range(10)]
    status, fail = _run(FailurePolicy(max_restarts=3), faults, progress=False)
    assert "3 restarts" in fail
    assert status.restarts + status.infrastructure_restarts == 3


def test_counted_restarts_are_limited_also_with_progress_O_19() -> None:
    """Different errors at different steps."""
    faults = [dataclasses.replace(ERROR, step=n, error=str(n)) for n in range(10)]
    status, fail = _run(FailurePolicy(max_restarts=4), faults)
    assert fail
    assert status.restarts == 4


def test_the_same_error_at_the_same_step_fails() -> None:
    """Also when another rank says it first the second time; at another step it is another error."""
    other = dataclasses.replace(ERROR, rank=3, message="Rank 3 raised ValueError: no (at step 5)")
    assert "same error" in _run(FailurePolicy(), [ERROR, other])[1]
    assert not _run(FailurePolicy(), [ERROR, dataclasses.replace(ERROR, step=6)])[1]
    assert not _run(FailurePolicy(), [KILL, KILL])[1]


def test_failing_before_the_first_step() -> None:
    """Twice by default, even with different errors; progress between them counts."""
    early = [dataclasses.replace(ERROR, before_first_step=True, step=None, error=str(n)) for n in range(3)]
    assert "before its first step" in _run(FailurePolicy(), early, progress=False)[1]
    assert not _run(FailurePolicy(startup_failures=5), early, progress=False)[1]
    assert not _run(FailurePolicy(), early, progress=True)[1]


def test_the_first_rule_that_matches_decides() -> None:
    """Order matters; codes and names of exceptions; NotIn."""
    rules = (
        FailureRule(action=RuleAction.IGNORE, on_exceptions=("ValueError",)),
        FailureRule(action=RuleAction.FAIL_JOB, on_exit_codes=(1, 42)),
        FailureRule(action=RuleAction.RESTART, on_exit_codes=(1,), exit_codes_in=False),
    )
    assert policy.matching(rules, ERROR) is RuleAction.IGNORE
    assert policy.matching(rules, dataclasses.replace(ERROR, exception="x.KeyError")) is RuleAction.FAIL_JOB
    assert policy.matching(rules, KILL) is RuleAction.RESTART
    assert policy.matching(rules, Fault(kind=FaultKind.HANG, message="", infrastructure=False)) is None


def test_rules_change_what_is_counted() -> None:
    """Ignore does not count an application's error, Restart counts a kill, FailJob fails at once."""
    ignore = FailurePolicy(rules=(FailureRule(action=RuleAction.IGNORE, on_exceptions=("ValueError",)),))
    status, fail = _run(ignore, [ERROR] * 5)
    assert (status.restarts, fail) == (0, "")
    count = FailurePolicy(rules=(FailureRule(action=RuleAction.RESTART, on_exit_codes=(137,)),))
    assert _run(count, [KILL])[0].restarts == 1
    fail_now = FailurePolicy(rules=(FailureRule(action=RuleAction.FAIL_JOB, on_exit_codes=(137,)),))
    assert "FailJob" in _run(fail_now, [KILL])[1]


def test_back_off_grows_up_to_its_limit_O_19() -> None:
    """And is nothing for the first faults of the infrastructure."""
    rules = FailurePolicy(back_off_seconds=1.0, back_off_limit_seconds=10.0)
    assert [policy.back_off(rules, 0, n) for n in (1, 2, 3, 4, 5, 6, 9)] == [0, 0, 1, 2, 4, 8, 10]
    assert [policy.back_off(rules, n, 1) for n in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 4, 8, 10]


def test_stable_progress_gives_the_budget_back_O_19() -> None:
    """After the set time, not before."""
    status = JobStatus(restarts=3, stable_since=100.0)
    rules = FailurePolicy(stable_seconds=600.0)
    assert policy.given_back(rules, status, 699.0).restarts == 3
    assert policy.given_back(rules, status, 700.0).restarts == 0


def test_fatal_faults_fail_at_once() -> None:
    """With the sentence of the fault."""
    fault = Fault(kind=FaultKind.FATAL, message="optimizer.hook cannot be saved", infrastructure=False)
    assert _run(FailurePolicy(), [fault])[1] == fault.message
