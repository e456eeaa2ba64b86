"""Finding the interpreter of the user's command, and how it runs Lastwords' runner."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

import lastwords
from lastwords.launcher.commands import Command, CommandError, Kind

_PROBE = """
import importlib.util, json, sys
sys.path = [p for p in sys.path if p]
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False
def version(name):
    try:
        import importlib.metadata
        return importlib.metadata.version(name)
    except Exception:
        return ""
print(json.dumps({
    "python": sys.version_info[:2], "torch": version("torch") if there("torch") else None, "numpy": there("numpy"),
    "lastwords": there("lastwords.trainer.runner"),
}))
"""
_PROBE_SECONDS = 120.0
_OLDEST = (3, 10)
_OLDEST_TORCH = (2, 6)
_OTHER_NAMES = ("python3", "python")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What an interpreter says about itself."""

    python: tuple[int, int]
    torch: str | None
    """Its version; "" when that cannot be told, None when there is no torch."""
    numpy: bool
    lastwords: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """How a rank process is started: `prefix` and then the runner's own arguments."""

    prefix: tuple[str, ...]
    """Begins with the interpreter's absolute path."""


def check_files(command: Command, path: str, folder: str) -> str:
    """
    Absolute path of the command's interpreter (links are kept: they are what makes a virtual environment).

    Raises CommandError when it, or the script, does not exist.
    """
    found = shutil.which(command.interpreter, path=path)
    if found is None:
        raise CommandError(f"The command {command.interpreter!r} cannot be run: {_missing(command.interpreter, path)}")
    if command.kind is Kind.SCRIPT:
        script = os.path.join(folder, command.target)
        if os.path.isdir(script):
            raise CommandError(f"{command.target!r} is a folder: name the script in it.")
        if not os.path.isfile(script):
            raise CommandError(
                f"There is no file {command.target!r} in {folder}: check the script's name, or give its whole path."
            )
        if not os.access(script, os.R_OK):
            raise CommandError(f"The script {command.target!r} may not be read by this user: check its permissions.")
    return os.path.join(folder, found)


def find_runner(command: Command, environment: Mapping[str, str], folder: str) -> Runner:
    """
    Look the command's files up and ask its interpreter what it can import. Raises CommandError.

    Waits for a process of its own, so it must be called before `Children` reaps everything.
    """
    interpreter = check_files(command, environment.get("PATH", os.defpath), folder)
    found = _probe(interpreter, command, environment)
    _check(command.interpreter, found)
    if found.lastwords:
        start = ("-m", "lastwords.trainer.runner")
    else:
        # At the end of the path, unlike PYTHONPATH: it must not hide any package of this interpreter.
        parent = os.path.dirname(os.path.dirname(os.path.abspath(lastwords.__file__)))
        start = ("-c", f"import sys; sys.path.append({parent!r}); from lastwords.trainer.runner import main; main()")
    return Runner(prefix=(interpreter, *command.flags, *start))


def _missing(name: str, path: str) -> str:
    if "/" in name:
        return "there is no such executable file. Check its name."
    other = next((other for other in _OTHER_NAMES if other != name and shutil.which(other, path=path)), None)
    if other is not None:
        return f"it is not in any folder of PATH, but {other!r} is. Write that, or the whole path of an interpreter."
    return (
        "it is not in any folder of PATH, and no other Python is. Activate the environment that has torch, or write "
        "the whole path of its interpreter."
    )


def _check(name: str, found: Found) -> None:
    """Raises CommandError when ranks cannot run in it."""
    if found.python < _OLDEST:
        raise CommandError(
            f"{name!r} is Python {found.python[0]}.{found.python[1]}: use {_OLDEST[0]}.{_OLDEST[1]} or newer."
        )
    if found.torch is None:
        raise CommandError(
            f"{name!r} has no torch: install it there, or name the interpreter of the environment that has it."
        )
    number = re.match(r"(\d+)\.(\d+)", found.torch)
    if number is not None and (int(number[1]), int(number[2])) < _OLDEST_TORCH:
        raise CommandError(
            f"{name!r} has torch {found.torch}: Lastwords needs {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or newer. Update "
            "it there, or name the interpreter of an environment that has a newer one."
        )
    if not found.numpy:
        raise CommandError(f"{name!r} has torch but no numpy, which Lastwords needs: install numpy there.")


def _probe(interpreter: str, command: Command, environment: Mapping[str, str]) -> Found:
    output, status = _run_probe(interpreter, command.flags, environment)
    try:
        told = json.loads(output.strip().splitlines()[-1])
        major, minor = told["python"]
        return Found(
            python=(int(major), int(minor)),
            torch=None if told["torch"] is None else str(told["torch"]),
            numpy=bool(told["numpy"]),
            lastwords=bool(told["lastwords"]),
        )
    except (ValueError, IndexError, KeyError, TypeError):
        text = output.strip()[-500:]
        raise CommandError(f"{command.interpreter!r} does not run Python code (exit status {status}): {text}") from None


def _run_probe(interpreter: str, flags: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, int]:
    try:
        done = subprocess.run(
            [interpreter, *flags, "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS:.0f} seconds", -1
    except OSError as error:
        return str(error), -1
    return done.stdout.decode(errors="replace"), done.returncode
