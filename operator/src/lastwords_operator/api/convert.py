"""From the job as users write it to what the core decides on."""

from __future__ import annotations

from lastwords_operator.api.job import (
    CodeOperator,
    FailurePolicySpec,
    FaultTolerantJob,
    IntervalModeName,
    IntervalSpec,
    LastWordsMode,
    ResumeFrom,
    Rule,
)
from lastwords_operator.core.model import (
    Deadlines,
    FailurePolicy,
    FailureRule,
    Interval,
    IntervalMode,
    JobSpec,
    RuleAction,
)


def to_core(job: FaultTolerantJob) -> JobSpec:
    """The specification as the core knows it."""
    spec = job.spec
    limits = spec.deadlines
    return JobSpec(
        name=job.metadata.name,
        workers=spec.workers.replicas,
        processes_per_worker=spec.workers.processes,
        interval=_interval(spec.checkpoint.interval),
        keep_last=spec.checkpoint.retention.last,
        keep_every=spec.checkpoint.retention.keep_every or 0,
        replicas=spec.checkpoint.replicas,
        last_words=spec.last_words.mode is LastWordsMode.ENABLED,
        last_words_timeout=spec.last_words.timeout_seconds,
        policy=_policy(spec.failure_policy),
        deadlines=Deadlines(
            startup=limits.startup_seconds,
            restore=limits.restore_seconds,
            first_step=limits.first_step_seconds,
            training_floor=limits.training_floor_seconds,
            save=limits.save_seconds,
            evaluate=limits.evaluate_seconds,
            finish=limits.finish_seconds,
        ),
        suspend=spec.suspend,
        allow_beginning=spec.checkpoint.resume_from is ResumeFrom.BEGINNING,
    )


def _interval(interval: IntervalSpec) -> Interval:
    if interval.mode is IntervalModeName.AUTO:
        return Interval()
    if interval.seconds is not None:
        return Interval(mode=IntervalMode.FIXED_SECONDS, seconds=interval.seconds)
    assert interval.steps is not None
    return Interval(mode=IntervalMode.FIXED_STEPS, steps=interval.steps)


def _policy(policy: FailurePolicySpec) -> FailurePolicy:
    return FailurePolicy(
        rules=tuple(_rule(rule) for rule in policy.rules),
        max_restarts=policy.max_restarts,
        startup_failures=policy.startup_failures,
        stable_seconds=policy.stable_seconds,
    )


def _rule(rule: Rule) -> FailureRule:
    codes = rule.on_exit_codes
    return FailureRule(
        action=RuleAction(rule.action.value),
        on_exit_codes=tuple(codes.values) if codes else (),
        exit_codes_in=codes is None or codes.operator is CodeOperator.IN,
        on_exceptions=tuple(rule.on_exceptions),
    )
