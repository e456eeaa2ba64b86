"""Job files: what is taken, and the sentence for what is not."""

from __future__ import annotations

import pathlib

import pytest
from pydantic import ValidationError

from lastwords_operator.api import JobFileError, load_job, to_core
from lastwords_operator.api.job import CheckpointSpec, ResumeFrom
from lastwords_operator.core.model import IntervalMode, RuleAction

TEXT = """
apiVersion: lastwords.dev/v1alpha1
kind: FaultTolerantJob
metadata: {name: tiny-gpt}
spec:
  workers:
    replicas: 2
    processesPerWorker: 3
    template:
      metadata: {labels: {team: a}}
      spec:
        tolerations: [{key: gpu}]
        containers:
          - name: trainer
            image: registry.example/train:1
            command: [python, train.py]
  checkpoint:
    storage: {uri: "file:///checkpoints"}
    interval: {mode: Fixed, steps: 20}
    retention: {last: 5, keepEvery: 500}
  lastWords: {timeoutSeconds: 30}
  failurePolicy:
    maxRestarts: 4
    rules:
      - {action: FailJob, onExitCodes: {operator: NotIn, values: [1, 2]}}
      - {action: Ignore, onExceptions: [torch.cuda.OutOfMemoryError]}
"""


def test_a_job_and_what_the_core_makes_of_it() -> None:
    """All fields arrive; the pod template is kept whole."""
    job = load_job(TEXT, "job.yaml")
    spec = to_core(job)
    assert (spec.name, spec.workers, spec.processes_per_worker, spec.keep_last) == ("tiny-gpt", 2, 3, 5)
    assert spec.keep_every == 500
    assert (spec.interval.mode, spec.interval.steps) == (IntervalMode.FIXED_STEPS, 20)
    assert (spec.last_words, spec.last_words_timeout, spec.policy.max_restarts) == (True, 30.0, 4)
    first, second = spec.policy.rules
    assert (first.action, first.on_exit_codes, first.exit_codes_in) == (RuleAction.FAIL_JOB, (1, 2), False)
    assert second.on_exceptions == ("torch.cuda.OutOfMemoryError",)
    template = job.spec.workers.template.model_dump(by_alias=True)
    assert template["metadata"] == {"labels": {"team": "a"}}
    assert template["spec"]["tolerations"] == [{"key": "gpu"}]


def test_the_example_in_the_repository_loads() -> None:
    """examples/chargpt/job.yaml."""
    path = pathlib.Path(__file__).parents[3] / "examples" / "chargpt" / "job.yaml"
    assert to_core(load_job(path.read_text(), str(path))).workers == 2


BAD = [
    ("replicas: 2", "replicas: two", "spec.workers.replicas: input should be a valid integer; it is 'two'"),
    ("replicas: 2", 'replicas: "2"', "spec.workers.replicas: input should be a valid integer; it is '2'"),
    ("replicas: 2", "replicas: 0", "spec.workers.replicas: input should be greater than or equal to 1; it is 0"),
    ("retention:", "retentoin:", "spec.checkpoint.retentoin: unknown key; did you mean retention?"),
    ("{last: 5,", "{newest: 5,", "spec.checkpoint.retention.newest: unknown key; known here: last, keepEvery"),
    (
        "keepEvery: 500",
        "keepEvery: 0",
        "spec.checkpoint.retention.keepEvery: input should be greater than or equal to 1",
    ),
    (
        "steps: 20",
        "steps: 20, seconds: 3",
        "spec.checkpoint.interval: mode Fixed needs exactly one of seconds and steps",
    ),
    ("mode: Fixed", "mode: Auto", "spec.checkpoint.interval: mode Auto takes no steps; set mode: Fixed to use it"),
    ("command:", "commands:", "spec.workers: container trainer has no command"),
    ("[1, 2]", "[1, 300]", "spec.failurePolicy.rules[0].onExitCodes.values[1]"),
    (", onExitCodes: {operator: NotIn, values: [1, 2]}", "", "spec.failurePolicy.rules[0]: a rule needs"),
    ("name: tiny-gpt", "name: Tiny_GPT", "metadata.name"),
    ("kind: FaultTolerantJob", "kind: Job", "kind: input should be 'FaultTolerantJob'; it is 'Job'"),
    ("checkpoint:\n", "checkpoints:\n", "spec.checkpoint: missing; add it"),
    ("    replicas: 2", "    replicas: 2\n    replicas: 3", "line 8, column 5: 'replicas' is given twice; remove one"),
    ("last: 5", "last: 0", "spec.checkpoint.retention.last: input should be greater than or equal to 1"),
    ("processesPerWorker: 3", "processesPerWorker: none", "spec.workers.processesPerWorker: "),
    ("apiVersion", "\tapiVersion", "job.yaml, line 2"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), BAD, ids=[sentence[:40] for _, _, sentence in BAD])
def test_what_is_wrong_is_said_with_its_path(old: str, new: str, sentence: str) -> None:
    """File, path in the file, and what to do; each line starts with the file."""
    assert old in TEXT
    with pytest.raises(JobFileError) as caught:
        load_job(TEXT.replace(old, new, 1), "job.yaml")
    assert sentence in str(caught.value)
    assert all(line.startswith("job.yaml") for line in str(caught.value).splitlines())


@pytest.mark.parametrize("text", ["", "[]", "just text", "a: 1\n---\nb: 2\n"])
def test_no_job_at_all(text: str) -> None:
    """A sentence, no trace."""
    with pytest.raises(JobFileError, match="job.yaml: expected"):
        load_job(text, "job.yaml")


def test_devices_make_ranks_when_auto() -> None:
    """processesPerWorker: Auto counts the devices that the trainer asks for, and is one without any."""
    text = TEXT.replace("processesPerWorker: 3", "processesPerWorker: Auto")
    assert to_core(load_job(text, "job.yaml")).processes_per_worker == 1
    limits = "command: [python, train.py]\n            resources: {limits: {nvidia.com/gpu: 8}}"
    text = text.replace("command: [python, train.py]", limits)
    assert to_core(load_job(text, "job.yaml")).processes_per_worker == 8


def test_resume_from_is_a_word_or_a_place() -> None:
    def resume_from(value: str) -> CheckpointSpec:
        return CheckpointSpec.model_validate({"storage": {"uri": "file:///x"}, "resumeFrom": value})

    assert (resume_from("Newest").foreign, resume_from("Beginning").foreign) == ("", "")
    assert resume_from("Beginning").resume_from is ResumeFrom.BEGINNING
    assert resume_from("s3://bucket/ns/job/").foreign == "s3://bucket/ns/job"
    assert resume_from("file:///storage/ns/job").foreign == "/storage/ns/job"
    for bad in ("newest", "somewhere", "nfs://host/x"):
        with pytest.raises(ValidationError):
            resume_from(bad)
