"""
Taking apart a command line that begins with a Python interpreter, or with `env`. Pure.

An interpreter with a script, a module or code can be started ahead, and the script runs in it as under plain python.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence

_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?[td]?$")
_VALUE_FLAGS = "WX"
"""Short flags that take a value, glued or as the next word."""
_PLAIN_FLAGS = "bBdEIOPqsSuvR"
_HASH_FLAG = "--check-hash-based-pycs"


class CommandError(ValueError):
    """The command cannot be run; the text is a sentence that says what to do."""


class Kind(str, enum.Enum):
    """What the interpreter is to run."""

    SCRIPT = "script"
    MODULE = "module"
    CODE = "code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """`interpreter` `flags` then the script, `-m` module or `-c` code in `target`, then `arguments`."""

    interpreter: str
    """As the user wrote it; not looked up yet."""
    flags: tuple[str, ...]
    kind: Kind
    target: str
    arguments: tuple[str, ...]
    local_rank_argument: bool = False
    """`--local-rank=N` comes before the arguments, as torch.distributed.launch has it."""

    def for_local_rank(self, local_rank: int) -> Command:
        """The command of one rank of a worker."""
        if not self.local_rank_argument:
            return self
        arguments = (f"--local-rank={local_rank}", *self.arguments)
        return dataclasses.replace(self, arguments=arguments, local_rank_argument=False)

    def words(self) -> list[str]:
        """The command as plain python would get it."""
        dash = {Kind.SCRIPT: [], Kind.MODULE: ["-m"], Kind.CODE: ["-c"]}[self.kind]
        return [self.interpreter, *self.flags, *dash, self.target, *self.arguments]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """What `env` does before it runs `words`: variables by name, None = removed."""

    variables: dict[str, str | None]
    words: list[str]


def base_name(word: str) -> str:
    """The last part of a command's first word."""
    return word.rsplit("/", 1)[-1]


def is_interpreter(word: str) -> bool:
    """Whether a command that begins with `word` is a Python interpreter by its name."""
    return _INTERPRETER.fullmatch(base_name(word)) is not None


def parse(words: Sequence[str]) -> Command:
    """Take apart a command whose first word is an interpreter. Raises CommandError when it runs nothing usable."""
    return _parse_flags(words[0], list(words[1:]))


def parse_env(words: Sequence[str]) -> Prefix | None:
    """Take apart `env NAME=VALUE… COMMAND…`; None when it does more than to set and to remove variables."""
    variables: dict[str, str | None] = {}
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name = word.removeprefix("--unset=") if word.startswith("--unset=") else word[2:]
        if word in ("-u", "--unset") and rest:
            name = rest.pop(0)
        elif not (word.startswith("--unset=") or (word.startswith("-u") and name)):
            return None
        variables[name] = None
    while rest and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    return Prefix(variables=variables, words=rest)


def _parse_flags(interpreter: str, rest: list[str]) -> Command:
    flags: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if word == _HASH_FLAG and rest:
            flags += [word, rest.pop(0)]
        elif word.startswith("--") or word == "-":
            raise CommandError(f"`{interpreter} {word}` runs no script: name the script, as in `python train.py`.")
        elif word.startswith("-"):
            found = _parse_letters(interpreter, word, rest, flags)
            if found is not None:
                return found
        else:
            rest.insert(0, word)
            break
    if not rest:
        raise CommandError(f"`{interpreter}` is given nothing to run: name the script, as in `python train.py`.")
    return _command(interpreter, flags, Kind.SCRIPT, rest[0], rest[1:])


def _parse_letters(interpreter: str, word: str, rest: list[str], flags: list[str]) -> Command | None:
    """One word of short flags, such as -u, -uO, -Xdev or -um; a Command when it holds -m or -c."""
    for index, letter in enumerate(word[1:], start=1):
        glued = word[index + 1 :]
        if letter in _PLAIN_FLAGS:
            continue
        if letter not in _VALUE_FLAGS + "mc":
            raise CommandError(f"`{interpreter} {word}` cannot be used for a rank: leave out -{letter}.")
        if not glued and not rest:
            raise CommandError(f"`{interpreter} {word}` lacks what follows -{letter}.")
        if letter in _VALUE_FLAGS:
            flags += [word] if glued else [word, rest.pop(0)]
            return None
        if index > 1:
            flags.append(word[:index])
        kind = Kind.MODULE if letter == "m" else Kind.CODE
        target = glued or rest.pop(0)
        return _command(interpreter, flags, kind, target, rest)
    flags.append(word)
    return None


def _command(interpreter: str, flags: list[str], kind: Kind, target: str, arguments: list[str]) -> Command:
    return Command(interpreter=interpreter, flags=tuple(flags), kind=kind, target=target, arguments=tuple(arguments))
