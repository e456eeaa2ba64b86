"""
Translating `torchrun OPTIONS SCRIPT ARGUMENTS` into the command of one rank. Pure.

What torchrun does besides starting the script (rendezvous, watching, restarting) is done by launcher and agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lastwords.launcher.commands import Command, CommandError, Kind

RUN_MODULES = ("torch.distributed.run", "torch.distributed.launcher.run")
LAUNCH_MODULE = "torch.distributed.launch"

_PROCESSES, _NODES, _MODULE, _USE_ENV = "nproc-per-node", "nnodes", "module", "use-env"
_COUNTED_BY_DEVICES = ("auto", "cpu", "gpu", "xpu")
_WITH_VALUE = (
    _PROCESSES, _NODES, "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval",
    "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee", "log-line-prefix-template",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
)  # fmt: skip
_WITHOUT_VALUE = ("standalone", _MODULE, "run-path")
_SHORT = {"m": _MODULE, "r": "redirects", "t": "tee"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How many processes the job has: `workers` nodes of `processes` each."""

    workers: int
    processes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """The command of a rank, and the options that have no effect, as torchrun calls them."""

    command: Command
    ignored: tuple[str, ...]

    def notice(self) -> str:
        """What the user is told."""
        text = "torchrun itself is not run: Lastwords starts, watches and restarts its script by itself"
        if not self.ignored:
            return f"{text}."
        return f"{text}. These options have no effect here: {', '.join(self.ignored)}."


def translate(interpreter: str, arguments: Sequence[str], size: Size | None, *, launch: bool) -> Translation | None:
    """
    The command that torchrun would have started; `launch`: it is the older torch.distributed.launch. `size`: of the
    job, None where it is not known.

    None when it cannot be said what torchrun would do (an unknown option, or a program that is not Python): it has to
    be run as it is. Raises CommandError when it asks for another number of processes, or runs nothing.
    """
    split = _split(arguments, (*_WITHOUT_VALUE, _USE_ENV) if launch else _WITHOUT_VALUE)
    if split is None:
        return None
    options, rest = split
    if not rest:
        raise CommandError("`torchrun` is given nothing to run: name the script, as in `torchrun train.py`.")
    if size is not None:
        _check_size(options, size)
    used = {_PROCESSES, _NODES, _MODULE, _USE_ENV, "run-path"}
    command = Command(
        interpreter=interpreter,
        flags=("-u",),
        kind=Kind.MODULE if _MODULE in options else Kind.SCRIPT,
        target=rest[0],
        arguments=tuple(rest[1:]),
        local_rank_argument=launch and _USE_ENV not in options,
    )
    return Translation(command=command, ignored=tuple(f"--{name}" for name in options if name not in used))


def _split(arguments: Sequence[str], without_value: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """Options by name, and what comes after them."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = _name(word, (*_WITH_VALUE, *without_value))
        if name is None or (equals and name in without_value):
            return None
        if name in _WITH_VALUE and not equals:
            if not rest:
                return None
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _name(word: str, names: Sequence[str]) -> tuple[str | None, bool, str]:
    """(name or None, whether a value is glued on, that value)."""
    if not word.startswith("--"):
        glued = word[2:].removeprefix("=")
        return _SHORT.get(word[1:2]), bool(glued), glued
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    return (name if name in names else None), bool(equals), value


def _check_size(options: Mapping[str, str], size: Size) -> None:
    processes = options.get(_PROCESSES, "auto")
    if processes not in (*_COUNTED_BY_DEVICES, str(size.processes)):
        raise CommandError(
            f"The command asks torchrun for {processes} processes per node, and the job has {size.processes} per "
            f"worker: make them equal (--procs {processes}, or processesPerWorker), or leave --{_PROCESSES} out."
        )
    nodes = options.get(_NODES)
    if nodes is None:
        return
    low, _, high = nodes.partition(":")
    if not (low.isdigit() and (high or low).isdigit() and int(low) <= size.workers <= int(high or low)):
        raise CommandError(
            f"The command asks torchrun for {nodes} nodes, and the job has {size.workers} workers: make them equal "
            f"(--workers {low}, or replicas), or leave --{_NODES} out."
        )
