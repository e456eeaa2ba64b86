"""
What becomes of the user's command: an interpreter whose ranks are started ahead, or a command that is run as it is.

(a) A Python interpreter with a script, a module or code, also behind `env` or in a script's first line, is taken apart:
that interpreter runs the ranks. (b) torchrun is translated into (a). (c) Anything else is *wrapped*: one process
tree per worker, whose ranks are found when the Checkpointer in them connects.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence

from lastwords.launcher import commands, interpreters, torchrun
from lastwords.launcher.commands import Command, CommandError, Kind
from lastwords.launcher.interpreters import Runner
from lastwords.launcher.torchrun import Size

_LAUNCHERS = frozenset({
    "accelerate", "accelerate-launch", "composer", "deepspeed", "dlrover-run", "fabric", "ft_launcher", "horovodrun",
    "lightning", "ray", "torchx", "tune",
})  # fmt: skip
"""Programs written in Python that start ranks by themselves: they are run as they are, once per worker."""
_LAUNCHER_MODULES = ("accelerate.commands.", "deepspeed.launcher.", "torch.distributed.elastic.", "ray.")
_LONG_SHEBANG = re.compile(rb"#!/bin/sh\s*\n'''exec' \"?([^\"\n]+?)\"? \"\$0\" \"\$@\"")
"""How pip writes the first lines of a script whose interpreter's path is too long for the kernel."""
_SHEBANG_BYTES = 4096
_INDIRECTIONS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A command that is run as it is: `path` is the executable file, `words` the whole command."""

    path: str
    words: tuple[str, ...]

    def notice(self) -> str:
        """What the user is told."""
        return (
            f"`{shlex.join(self.words)[:200]}` is run as it is, once per worker, as it is no Python command that can "
            "be taken apart: each restart starts it anew (no warm start). A torchrun in it joins the job by itself."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the launcher runs: `command` with `runner`, or `wrapped`; `error`: why it can run nothing."""

    command: Command | None = None
    runner: Runner | None = None
    wrapped: Wrapped | None = None
    variables: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """What `env` in the command sets and (None) removes."""
    notices: dict[str, str] = dataclasses.field(default_factory=dict)
    """For the user, by code."""
    error: str = ""


def load(words: Sequence[str], environment: Mapping[str, str], folder: str, size: Size | None) -> Program:
    """Find out about the command, its files and its interpreter. Never raises: the sentence is in `error`."""
    try:
        program = resolve(words, environment, folder, size)
        if program.command is None:
            return program
        changed = with_variables(environment, program.variables)
        return dataclasses.replace(program, runner=interpreters.find_runner(program.command, changed, folder))
    except CommandError as error:
        return Program(error=str(error))


def with_variables(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment after `env` has changed it."""
    result = dict(environment)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def resolve(words: Sequence[str], environment: Mapping[str, str], folder: str, size: Size | None) -> Program:
    """Which of the three kinds the command is; its interpreter is not asked anything yet. Raises CommandError."""
    if not words:
        raise CommandError("There is no command: put it after `--`, for example `-- python train.py`.")
    found = _Resolver(environment, folder, size).python(list(words))
    if found is not None:
        return found
    wrapped = Wrapped(path=_executable(words[0], environment, folder), words=tuple(words))
    return Program(wrapped=wrapped, notices={"wrapped": wrapped.notice()})


class _Resolver:
    """Follows `env` and first lines of scripts until an interpreter comes."""

    def __init__(self, environment: Mapping[str, str], folder: str, size: Size | None) -> None:
        self._environment = dict(environment)
        self._folder = folder
        self._size = size
        self._variables: dict[str, str | None] = {}

    def python(self, words: list[str]) -> Program | None:
        """The Python program that the command is; None when it is none."""
        for _ in range(_INDIRECTIONS):
            if not words:
                raise CommandError("`env` is given nothing to run: put the command behind the variables.")
            name = commands.base_name(words[0])
            if name == "env":
                prefix = commands.parse_env(words)
                if prefix is None:
                    return None
                self._variables |= prefix.variables
                self._environment = with_variables(self._environment, prefix.variables)
                words = prefix.words
            elif commands.is_interpreter(words[0]):
                return self._interpreter(words)
            elif name in _LAUNCHERS:
                return None
            else:
                path = _executable(words[0], self._environment, self._folder)
                shebang = read_shebang(os.path.join(self._folder, path))
                if not shebang or not (commands.base_name(shebang[0]) == "env" or commands.is_interpreter(shebang[0])):
                    return None
                if name == "torchrun":
                    return self._torchrun(shebang, words[1:], launch=False)
                words = [*shebang, path, *words[1:]]
        return None

    def _interpreter(self, words: list[str]) -> Program | None:
        command = commands.parse(words)
        if command.kind is Kind.MODULE:
            if command.target in (*torchrun.RUN_MODULES, torchrun.LAUNCH_MODULE):
                launch = command.target == torchrun.LAUNCH_MODULE
                return self._torchrun([command.interpreter], command.arguments, launch=launch)
            if f"{command.target}.".startswith(_LAUNCHER_MODULES):
                return None
        return self._program(command)

    def _torchrun(self, interpreter: list[str], arguments: Sequence[str], *, launch: bool) -> Program | None:
        # torchrun takes the same variable.
        named = self._environment.get("PYTHON_EXEC") or next(filter(commands.is_interpreter, interpreter), "")
        translation = torchrun.translate(named, arguments, self._size, launch=launch) if named else None
        if translation is None:
            return None
        return self._program(translation.command, torchrun=translation.notice())

    def _program(self, command: Command, **notices: str) -> Program:
        return Program(command=command, variables=self._variables, notices=notices)


def read_shebang(path: str) -> list[str]:
    """The words that the kernel puts before a script's path, as its first line says; empty when it is no script."""
    head = _head(path)
    long = _LONG_SHEBANG.match(head)
    if long is not None:
        return [os.fsdecode(long[1])]
    if not head.startswith(b"#!"):
        return []
    interpreter, _, argument = os.fsdecode(head[2:].split(b"\n", 1)[0]).strip().partition(" ")
    argument = argument.strip()
    if commands.base_name(interpreter) == "env" and argument.startswith(("-S", "--split-string")):
        _, _, argument = argument.partition("S" if argument.startswith("-S") else "string")
        try:
            return [interpreter, *shlex.split(argument.lstrip("= "))]
        except ValueError:
            return []
    return [interpreter, argument] if argument else [interpreter]


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_SHEBANG_BYTES)
    except OSError:
        return b""  # a program may be executable and yet not readable


def _executable(word: str, environment: Mapping[str, str], folder: str) -> str:
    """The file that the command's first word names. Raises CommandError."""
    name, equals, _ = word.partition("=")
    if equals and name.isidentifier():
        raise CommandError(f"{word!r} sets a variable, which only a shell understands: write `env {word} …`.")
    path = environment.get("PATH", os.defpath)
    found = shutil.which(os.path.join(folder, word) if "/" in word else word, path=path)
    if found is not None:
        found = word if "/" in word else found
        head = _head(os.path.join(folder, found))
        if head and not head.startswith(b"#!") and b"\0" not in head:
            raise CommandError(
                f"{word!r} is a text file without a first line that says what runs it: write `bash {word} …` or "
                f"`python {word} …`, or begin it with a line such as `#!/bin/bash`."
            )
        return found
    if os.path.isfile(os.path.join(folder, word)):
        runs = "python" if word.endswith(".py") else "bash"
        raise CommandError(
            f"The file {word!r} cannot be run by itself: write `{runs} {word} …`, or make it executable (chmod +x) and "
            "name it with its folder (./…)."
        )
    where = "there is no such file" if "/" in word else "it is not in any folder of PATH"
    raise CommandError(f"The command {word!r} cannot be run: {where}. Check its name.")
