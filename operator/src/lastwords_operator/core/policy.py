"""Whether a fault is answered by a restart, when, and out of which budget. First rule that matches decides."""

from __future__ import annotations

import dataclasses

from lastwords_operator.core.model import (
    ErrorMark,
    FailurePolicy,
    FailureRule,
    Fault,
    FaultKind,
    JobStatus,
    RuleAction,
)

_SCRIPT = (FaultKind.USER_EXCEPTION, FaultKind.RANK_EXITED, FaultKind.RANK_CRASHED)
"""Faults in which the script itself reported an error that can be recognised again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """`fail`: why the job fails ("" = it is restarted). `status` has the counters and the back-off."""

    status: JobStatus
    fail: str = ""


def judge(policy: FailurePolicy, status: JobStatus, fault: Fault, now: float) -> Verdict:
    """Decide on a fault. Called once for each root fault."""
    if fault.kind in (FaultKind.FATAL, FaultKind.NON_FINITE):
        return Verdict(status=status, fail=fault.message)
    action = matching(policy.rules, fault)
    if action is RuleAction.FAIL_JOB:
        return Verdict(status=status, fail=f"{fault.message}; a rule of the failure policy says FailJob")
    status = _marked(status, fault)
    repeated = status.last_error is not None and status.last_error.count > 1
    if repeated and fault.kind in _SCRIPT and action is None:
        return Verdict(status=status, fail=f"{fault.message}: the same error at the same step again")
    if status.startup_failures >= policy.startup_failures:
        return Verdict(
            status=status,
            fail=f"{fault.message}; the script failed {status.startup_failures} times before its first step",
        )
    counted = action is RuleAction.RESTART or (action is None and not fault.infrastructure)
    spent = status.restarts if counted else 0
    if max(spent, status.restarts_without_progress) >= policy.max_restarts:
        how = "restarts" if spent >= policy.max_restarts else "restarts in a row without a new step"
        return Verdict(status=status, fail=f"{fault.message}; all {policy.max_restarts} {how} are used up")
    without = status.restarts_without_progress + 1
    status = dataclasses.replace(
        status,
        restarts=status.restarts + int(counted),
        restarts_total=status.restarts_total + int(counted),
        infrastructure_restarts=status.infrastructure_restarts + int(not counted),
        restarts_without_progress=without,
    )
    delay = back_off(policy, status.restarts if counted else 0, without)
    return Verdict(status=dataclasses.replace(status, back_off_until=now + delay if delay else None))


def matching(rules: tuple[FailureRule, ...], fault: Fault) -> RuleAction | None:
    """Action of the first rule that matches, or None."""
    for rule in rules:
        if rule.on_exit_codes and (
            fault.exit_code is None or (fault.exit_code in rule.on_exit_codes) != rule.exit_codes_in
        ):
            continue
        names = {fault.exception, fault.exception.rpartition(".")[2]} - {""}
        if rule.on_exceptions and not names & set(rule.on_exceptions):
            continue
        return rule.action
    return None


def back_off(policy: FailurePolicy, counted: int, without_progress: int) -> float:
    """
    Seconds to wait before the next attempt: doubled for each counted restart, and for each in a row without a new
    step after the second, up to the limit. Infrastructure faults that let the job go on between them wait for nothing.
    """
    exponent = max(counted, without_progress - 2)
    if exponent <= 0:
        return 0.0
    return min(policy.back_off_limit_seconds, policy.back_off_seconds * 2.0 ** min(exponent - 1, 30))


def with_progress(status: JobStatus) -> JobStatus:
    """The attempt made its first new step."""
    return dataclasses.replace(status, restarts_without_progress=0, startup_failures=0)


def given_back(policy: FailurePolicy, status: JobStatus, now: float) -> JobStatus:
    """The budget is there again once the attempt has run undisturbed for long enough."""
    stable = status.stable_since
    if status.restarts == 0 or stable is None or now - stable < policy.stable_seconds:
        return status
    return dataclasses.replace(status, restarts=0, last_error=None)


def _marked(status: JobStatus, fault: Fault) -> JobStatus:
    if fault.kind not in _SCRIPT:
        return status
    text = f"{fault.exception}: {fault.error}" if fault.exception else f"exit code {fault.exit_code}"
    last = status.last_error
    same = last is not None and (last.text, last.step) == (text, fault.step)
    mark = ErrorMark(text=text, step=fault.step, count=last.count + 1 if last and same else 1)
    failures = status.startup_failures + 1 if fault.before_first_step else 0
    return dataclasses.replace(status, last_error=mark, startup_failures=failures)
