"""Finding the interpreter of the user's command, and how it runs Lastwords' runner."""

from __future__ import annotations

import dataclasses
import json
import os
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
print(json.dumps([sys.version_info[:2], there("torch"), there("lastwords.trainer.runner")]))
"""
_PROBE_SECONDS = 120.0
_OLDEST = (3, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """How a rank process is started: `prefix` and then the runner's own arguments."""

    prefix: tuple[str, ...]
    interpreter: str
    """Absolute path."""


def check_files(command: Command, path: str, folder: str) -> str:
    """
    Absolute path of the command's interpreter (links are kept: they are what makes a virtual environment).

    Raises CommandError when it, or the script, does not exist.
    """
    found = shutil.which(command.interpreter, path=path)
    if found is None:
        where = "there is no such executable file" if "/" in command.interpreter else "it is not in any folder of PATH"
        raise CommandError(f"The command {command.interpreter!r} cannot be run: {where}. Check its name.")
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
    version, has_torch, has_lastwords = _probe(interpreter, command, environment)
    if version < _OLDEST:
        raise CommandError(
            f"{command.interpreter!r} is Python {version[0]}.{version[1]}: use {_OLDEST[0]}.{_OLDEST[1]} or newer."
        )
    if not has_torch:
        raise CommandError(
            f"{command.interpreter!r} has no torch: install it there, or name the interpreter of the environment "
            "that has it."
        )
    if has_lastwords:
        start = ("-m", "lastwords.trainer.runner")
    else:
        # At the end of the path, unlike PYTHONPATH: it must not hide any package of this interpreter.
        parent = os.path.dirname(os.path.dirname(os.path.abspath(lastwords.__file__)))
        start = ("-c", f"import sys; sys.path.append({parent!r}); from lastwords.trainer.runner import main; main()")
    return Runner(prefix=(interpreter, *command.flags, *start), interpreter=interpreter)


def _probe(interpreter: str, command: Command, environment: Mapping[str, str]) -> tuple[tuple[int, int], bool, bool]:
    output, status = _run_probe(interpreter, command.flags, environment)
    try:
        version, has_torch, has_lastwords = json.loads(output.strip().splitlines()[-1])
        return (int(version[0]), int(version[1])), bool(has_torch), bool(has_lastwords)
    except (ValueError, IndexError, TypeError):
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
