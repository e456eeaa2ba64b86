"""
The FaultTolerantJob (lastwords.dev/v1alpha1) as pydantic models: the same for `lastwords run -f` and for a cluster.

Keys that are not known are refused, except inside of the pod template, which keeps everything a pod can have.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from lastwords.storage import places

# Strict, since 2 is not "2" and not true: what Kubernetes would refuse is refused here too.
Count = Annotated[int, Field(strict=True)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, frozen=True, str_strip_whitespace=True
    )


class _Open(BaseModel):
    """Kubernetes types of which we read a few fields and keep the rest."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True, frozen=True)


class Metadata(_Open):
    """Name and whatever else Kubernetes puts there."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    namespace: str = "default"


class EnvVar(_Open):
    """One environment variable; only those with a plain value count on one machine."""

    name: str = Field(min_length=1)
    value: str | None = None


class Container(_Open):
    """A container of the pod template."""

    name: str
    image: str = ""
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    working_dir: str | None = None


class PodSpec(_Open):
    """Spec of the pod template."""

    containers: list[Container] = Field(min_length=1)


class PodTemplate(_Open):
    """A pod template, whole."""

    spec: PodSpec

    @property
    def trainer(self) -> Container | None:
        """The container named `trainer`, else the only one."""
        named = [container for container in self.spec.containers if container.name == "trainer"]
        if named:
            return named[0]
        return self.spec.containers[0] if len(self.spec.containers) == 1 else None


class Workers(_Strict):
    """The workers. `processes_per_worker`: ranks per worker; Auto = the devices that the trainer asks for, else 1."""

    replicas: Count = Field(ge=1, le=4096)
    processes_per_worker: Annotated[Count, Field(ge=1, le=64)] | Literal["Auto"] = "Auto"
    template: PodTemplate

    @model_validator(mode="after")
    def _has_command(self) -> Workers:
        trainer = self.template.trainer
        if trainer is None:
            raise ValueError("several containers and none is named trainer; name the one that trains `trainer`")
        if not trainer.command:
            raise ValueError(
                f"container {trainer.name} has no command; "
                "set template.spec.containers[].command, e.g. [python, train.py]"
            )
        return self

    @property
    def processes(self) -> int:
        """Ranks per worker as a number."""
        if self.processes_per_worker != "Auto":
            return self.processes_per_worker
        return max(1, _devices(self.template.trainer))


def _devices(container: Container | None) -> int:
    resources = (container.model_extra or {}).get("resources") if container else None
    limits: dict[str, Any] = (resources.get("limits") or {}) if isinstance(resources, dict) else {}
    counts = [int(value) for key, value in limits.items() if key.endswith("/gpu") and str(value).isdigit()]
    return sum(counts)


class PersistentVolumeClaim(_Strict):
    """The claim that holds file:// storage."""

    claim_name: str


class Storage(_Strict):
    """Where checkpoints go: file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix."""

    uri: str = Field(pattern=r"^[a-z][a-z0-9]*://.+")
    persistent_volume_claim: PersistentVolumeClaim | None = None

    @field_validator("uri")
    @classmethod
    def _is_a_place(cls, uri: str) -> str:
        places.normal(uri)
        return uri


class IntervalModeName(enum.StrEnum):
    """Names of the interval's modes."""

    AUTO = "Auto"
    FIXED = "Fixed"


class IntervalSpec(_Strict):
    """`Auto`, or `Fixed` with either `seconds` or `steps`."""

    mode: IntervalModeName = IntervalModeName.AUTO
    seconds: Seconds | None = None
    steps: Count | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> IntervalSpec:
        given = [name for name in ("seconds", "steps") if getattr(self, name) is not None]
        if self.mode is IntervalModeName.FIXED and len(given) != 1:
            raise ValueError("mode Fixed needs exactly one of seconds and steps")
        if self.mode is IntervalModeName.AUTO and given:
            raise ValueError(f"mode Auto takes no {given[0]}; set mode: Fixed to use it")
        return self


class Retention(_Strict):
    """The newest `last` checkpoints are kept, and with `keepEvery` the first at or after every so many steps."""

    last: Count = Field(default=3, ge=1)
    keep_every: Count | None = Field(default=None, ge=1)


class ResumeFrom(enum.StrEnum):
    """
    `Newest` of the job's own. `Beginning` permits a start at step 0 although progress was made and nothing of it can be
    used. Anything else is where a checkpoint of another job is, which this one begins with.
    """

    NEWEST = "Newest"
    BEGINNING = "Beginning"


class CheckpointSpec(_Strict):
    """How and where state is saved."""

    storage: Storage
    interval: IntervalSpec = IntervalSpec()
    retention: Retention = Retention()
    replicas: Count = Field(default=0, ge=0, le=8)
    """Other workers that keep each snapshot too, for state of which no other worker holds a copy."""
    resume_from: ResumeFrom | str = ResumeFrom.NEWEST

    @field_validator("resume_from")
    @classmethod
    def _is_known(cls, value: ResumeFrom | str) -> ResumeFrom | str:
        if isinstance(value, ResumeFrom) or value in {item.value for item in ResumeFrom}:
            return ResumeFrom(value)
        if "://" not in value and not value.startswith("/"):
            raise ValueError(f"{value} is neither Newest, nor Beginning, nor a place such as s3://bucket/prefix/ns/job")
        return places.normal(value)

    @property
    def foreign(self) -> str:
        """Where another job's checkpoint is that this one begins with; "" = nowhere."""
        return "" if isinstance(self.resume_from, ResumeFrom) else self.resume_from


class LastWordsMode(enum.StrEnum):
    """Whether survivors hand over what they hold."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class LastWordsSpec(_Strict):
    """Last words and the longest time they may take."""

    mode: LastWordsMode = LastWordsMode.ENABLED
    timeout_seconds: Seconds = 60.0


class CodeOperator(enum.StrEnum):
    """How exit codes are compared."""

    IN = "In"
    NOT_IN = "NotIn"


class ExitCodes(_Strict):
    """Exit codes of a rank; 128 + n for signal n."""

    operator: CodeOperator = CodeOperator.IN
    values: list[Annotated[Count, Field(ge=0, le=255)]] = Field(min_length=1)


class RuleActionName(enum.StrEnum):
    """What a rule does: fail the job, restart and count it, or restart without counting."""

    FAIL_JOB = "FailJob"
    RESTART = "Restart"
    IGNORE = "Ignore"


class Rule(_Strict):
    """The first rule whose conditions all hold decides."""

    action: RuleActionName
    on_exit_codes: ExitCodes | None = None
    on_exceptions: list[str] = []

    @model_validator(mode="after")
    def _has_condition(self) -> Rule:
        if self.on_exit_codes is None and not self.on_exceptions:
            raise ValueError("a rule needs onExitCodes or onExceptions: without them it would match every fault")
        return self


class FailurePolicySpec(_Strict):
    """When faults are answered by a restart."""

    max_restarts: Count = Field(default=10, ge=0)
    rules: list[Rule] = []
    stable_seconds: Seconds = 600.0
    startup_failures: Count = Field(default=2, ge=1)


class DeadlinesSpec(_Strict):
    """Longest times by phase, in seconds; what exceeds them is a hang."""

    startup_seconds: Seconds = 600.0
    restore_seconds: Seconds = 600.0
    first_step_seconds: Seconds = 600.0
    training_floor_seconds: Seconds = 30.0
    save_seconds: Seconds = 600.0
    evaluate_seconds: Seconds = 3600.0
    finish_seconds: Seconds = 300.0


class JobSpecModel(_Strict):
    """What the user wants."""

    workers: Workers
    checkpoint: CheckpointSpec
    last_words: LastWordsSpec = LastWordsSpec()
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    deadlines: DeadlinesSpec = DeadlinesSpec()
    suspend: Annotated[bool, Field(strict=True)] = False
    managed_by: str | None = None

    @model_validator(mode="after")
    def _replicas_have_room(self) -> JobSpecModel:
        replicas, workers = self.checkpoint.replicas, self.workers.replicas
        if replicas >= workers:
            raise ValueError(
                f"checkpoint.replicas is {replicas}, but {workers} workers have only {workers - 1} others to keep a "
                f"snapshot; set it to {workers - 1} or less"
            )
        return self


class FaultTolerantJob(_Strict):
    """One job."""

    api_version: Literal["lastwords.dev/v1alpha1"]
    kind: Literal["FaultTolerantJob"]
    metadata: Metadata
    spec: JobSpecModel
    status: dict[str, Any] = {}
    """Written by the operator; ignored in a file."""
