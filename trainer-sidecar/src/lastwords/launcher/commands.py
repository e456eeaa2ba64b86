"""
Understanding the user's command: which interpreter runs what, and with which flags. Pure.

Only commands that are a Python interpreter with a script, a module or code are taken: their interpreter can be started
ahead, and the script runs in it as under plain python.
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

    def words(self) -> list[str]:
        """The command as plain python would get it."""
        dash = {Kind.SCRIPT: [], Kind.MODULE: ["-m"], Kind.CODE: ["-c"]}[self.kind]
        return [self.interpreter, *self.flags, *dash, self.target, *self.arguments]


def parse(words: Sequence[str]) -> Command:
    """Take a command apart. Raises CommandError when it is not a Python interpreter that runs something."""
    if not words:
        raise CommandError("There is no command: put it after `--`, for example `-- python train.py`.")
    name = words[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        raise CommandError(
            "torchrun starts and restarts ranks by itself: give the script directly, `python train.py …`; "
            "Lastwords sets RANK, WORLD_SIZE and the other variables that torchrun sets."
        )
    if not _INTERPRETER.fullmatch(name):
        raise CommandError(
            f"The command begins with {words[0]!r}, which is not a Python interpreter: only `python script.py …`, "
            "`python -m module …` and `python -c code …` can be run so far."
        )
    return _parse_flags(words[0], list(words[1:]))


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
