"""What the user asked for, on the command line or in a job file, as one value. Both become a FaultTolerantJob."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lastwords.protocol import codec
from lastwords.storage import places
from lastwords_operator import api
from lastwords_operator.core.model import JobSpec


class AskedError(Exception):
    """What was asked for cannot be done; the text says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `lastwords run` that say what the job is; None = not given."""

    argv: Sequence[str]
    file: pathlib.Path | None = None
    name: str | None = None
    workers: int | None = None
    procs: int | None = None
    storage: str | None = None
    directory: pathlib.Path | None = None
    save_every: Mapping[str, float] | None = None
    """{"seconds": s} or {"steps": n}."""
    replicas: int | None = None
    keep_every: int | None = None
    resume_from: str | None = None
    max_restarts: int | None = None
    hang_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A job on one machine: what is decided from (`spec`), what runs, and where."""

    spec: JobSpec
    command: tuple[str, ...]
    cwd: pathlib.Path
    folder: pathlib.Path
    storage: str
    """A folder or a URL, as `places.normal` gives it."""
    namespace: str
    environment: Mapping[str, str]
    resume_from: str = ""
    """Where another job's checkpoint is that this one begins with."""

    def record(self) -> dict[str, Any]:
        """What makes two commands the same job, in plain values."""
        return {
            "spec": codec.to_plain(self.spec),
            "command": list(self.command),
            "cwd": str(self.cwd),
            "storage": self.storage,
            "namespace": self.namespace,
            "environment": dict(self.environment),
            "resume_from": self.resume_from,
        }


def ask(flags: Flags) -> Asked:
    """The job. Raises AskedError, or JobFileError with the path of each mistake in the file."""
    if flags.file is not None:
        return _from_file(flags, flags.file)
    if not flags.argv:
        raise AskedError("nothing to run: put the command after --, e.g. lastwords run -- python train.py, or use -f")
    name = flags.name if flags.name is not None else _name_of(flags.argv)
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise AskedError(f"--name {name!r} must be small letters, digits and '-', and at most 63 characters")
    folder = _folder(flags, name)
    storage = _place(flags.storage or str(folder / "checkpoints"))
    return _asked(api.FaultTolerantJob.model_validate(_manifest(flags, name, storage)), folder, storage)


def _from_file(flags: Flags, path: pathlib.Path) -> Asked:
    given: list[tuple[str, object]] = [("--workers", flags.workers), ("--procs", flags.procs), ("--name", flags.name)]
    given += [("--save-every", flags.save_every), ("--replicas", flags.replicas)]
    given += [("--max-restarts", flags.max_restarts), ("--hang-seconds", flags.hang_seconds)]
    given += [("--keep-every", flags.keep_every), ("--resume-from", flags.resume_from)]
    given += [("a command", flags.argv or None)]
    both = [name for name, value in given if value is not None]
    if both:
        raise AskedError(f"{both[0]} and -f do not go together: write it into {path}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise AskedError(f"cannot read {path}: {reason}") from None
    job = api.load_job(text, str(path))
    folder = _folder(flags, job.metadata.name)
    return _asked(job, folder, _place(flags.storage or job.spec.checkpoint.storage.uri))


def _asked(job: api.FaultTolerantJob, folder: pathlib.Path, storage: str) -> Asked:
    trainer = job.spec.workers.template.trainer
    assert trainer is not None, "validated by the model"
    cwd = pathlib.Path(trainer.working_dir or os.curdir).resolve()
    if not cwd.is_dir():
        raise AskedError(f"workingDir {cwd} is not a folder on this machine")
    return Asked(
        spec=api.to_core(job),
        command=(*trainer.command, *trainer.args),
        cwd=cwd,
        folder=folder,
        storage=storage,
        namespace=job.metadata.namespace,
        environment={variable.name: variable.value for variable in trainer.env if variable.value is not None},
        resume_from=job.spec.checkpoint.foreign,
    )


def _manifest(flags: Flags, name: str, storage: str) -> dict[str, Any]:
    interval = {"mode": "Fixed", **flags.save_every} if flags.save_every else {"mode": "Auto"}
    deadlines = {} if flags.hang_seconds is None else {"trainingFloorSeconds": flags.hang_seconds}
    policy = {} if flags.max_restarts is None else {"maxRestarts": flags.max_restarts}
    trainer = {"name": "trainer", "command": list(flags.argv)}
    uri = f"file://{storage}" if places.is_folder(storage) else storage
    return {
        "apiVersion": "lastwords.dev/v1alpha1",
        "kind": "FaultTolerantJob",
        "metadata": {"name": name},
        "spec": {
            "workers": {
                "replicas": flags.workers or 1,
                "processesPerWorker": flags.procs or 1,
                "template": {"spec": {"containers": [trainer]}},
            },
            "checkpoint": {
                "storage": {"uri": uri},
                "interval": interval,
                "retention": {"keepEvery": flags.keep_every},
                "resumeFrom": _place(flags.resume_from) if flags.resume_from else "Newest",
                "replicas": flags.replicas or 0,
            },
            "failurePolicy": policy,
            "deadlines": deadlines,
        },
    }


def _folder(flags: Flags, name: str) -> pathlib.Path:
    return (flags.directory or pathlib.Path(".lastwords") / name).resolve()


def _place(storage: str) -> str:
    try:
        return places.normal(storage)
    except places.PlaceError as error:
        raise AskedError(str(error)) from None


def _name_of(argv: Sequence[str]) -> str:
    """`python path/to/My_Train.py --x` gives my-train."""
    words = [word for word in argv[1:] if not word.startswith("-")] or list(argv)
    # A launcher's options may have values of their own in front of the script.
    script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
    stem = pathlib.PurePath(script).name.removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:63].strip("-") or "job"
