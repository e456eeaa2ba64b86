"""What the user asked for, on the command line or in a job file, as one value."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lastwords.protocol import codec
from lastwords_operator.core.model import FailurePolicy, Interval, IntervalMode, JobSpec


class AskedError(Exception):
    """What was asked for cannot be done; the text says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEvery:
    """A fixed interval: one of the two is set."""

    seconds: float | None = None
    steps: int | None = None

    def interval(self) -> Interval:
        """As the core knows it."""
        if self.steps is not None:
            return Interval(mode=IntervalMode.FIXED_STEPS, steps=self.steps)
        assert self.seconds is not None
        return Interval(mode=IntervalMode.FIXED_SECONDS, seconds=self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A job on one machine: what is decided from (`spec`), what runs, and where."""

    spec: JobSpec
    command: tuple[str, ...]
    cwd: pathlib.Path
    folder: pathlib.Path
    storage: pathlib.Path
    namespace: str = "default"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What makes two commands the same job, in plain values."""
        return {
            "spec": codec.to_plain(self.spec),
            "command": list(self.command),
            "cwd": str(self.cwd),
            "storage": str(self.storage),
            "namespace": self.namespace,
            "environment": dict(self.environment),
        }


def from_flags(
    *,
    argv: Sequence[str],
    name: str | None,
    workers: int | None,
    procs: int | None,
    storage: pathlib.Path | None,
    directory: pathlib.Path | None,
    save_every: SaveEvery | None,
    max_restarts: int | None,
) -> Asked:
    """From the flags of `lastwords run`. Raises AskedError."""
    if not argv:
        raise AskedError("nothing to run: put the command after --, e.g. lastwords run -- python train.py, or use -f")
    name = name if name is not None else _name_of(argv)
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise AskedError(f"--name {name!r} must be small letters, digits and '-', and at most 63 characters")
    policy = FailurePolicy() if max_restarts is None else FailurePolicy(max_restarts=max_restarts)
    spec = JobSpec(
        name=name,
        workers=workers or 1,
        processes_per_worker=procs or 1,
        interval=save_every.interval() if save_every is not None else Interval(),
        policy=policy,
    )
    folder = (directory or pathlib.Path(".lastwords") / name).resolve()
    return Asked(
        spec=spec,
        command=tuple(argv),
        cwd=pathlib.Path.cwd(),
        folder=folder,
        storage=storage.resolve() if storage is not None else folder / "checkpoints",
    )


def _name_of(argv: Sequence[str]) -> str:
    """`python path/to/My_Train.py --x` gives my-train."""
    words = [word for word in argv[1:] if not word.startswith("-")] or list(argv)
    stem = pathlib.PurePath(words[0]).name.removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:63].strip("-") or "job"
