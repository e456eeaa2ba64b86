"""What the launcher makes of the user's command."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from lastwords.launcher import commands, interpreters
from lastwords.launcher.commands import Kind

TAKEN = [
    # command, interpreter, flags, kind, target, arguments
    ("python train.py", "python", "", Kind.SCRIPT, "train.py", ""),
    ("python3 train.py --lr 1 -m x", "python3", "", Kind.SCRIPT, "train.py", "--lr 1 -m x"),
    ("/usr/bin/python3.11 -u script.py", "/usr/bin/python3.11", "-u", Kind.SCRIPT, "script.py", ""),
    ("./venv/bin/python -uO a.py -u", "./venv/bin/python", "-uO", Kind.SCRIPT, "a.py", "-u"),
    ("python3.13t a.py", "python3.13t", "", Kind.SCRIPT, "a.py", ""),
    ("python -X dev -Walways -W ignore a.py", "python", "-X dev -Walways -W ignore", Kind.SCRIPT, "a.py", ""),
    ("python -uXdev a.py", "python", "-uXdev", Kind.SCRIPT, "a.py", ""),
    ("python --check-hash-based-pycs always a.py", "python", "--check-hash-based-pycs always", Kind.SCRIPT, "a.py", ""),
    ("python -- -odd.py x", "python", "", Kind.SCRIPT, "-odd.py", "x"),
    ("python -m pkg.mod --a", "python", "", Kind.MODULE, "pkg.mod", "--a"),
    ("python -u -m mod -u", "python", "-u", Kind.MODULE, "mod", "-u"),
    ("python -um mod", "python", "-u", Kind.MODULE, "mod", ""),
    ("python -mmod", "python", "", Kind.MODULE, "mod", ""),
    ("python -I -c print(1) a b", "python", "-I", Kind.CODE, "print(1)", "a b"),
]


@pytest.mark.parametrize(("line", "interpreter", "flags", "kind", "target", "arguments"), TAKEN)
def test_interpreter_forms_are_taken_apart(
    line: str, interpreter: str, flags: str, kind: Kind, target: str, arguments: str
) -> None:
    command = commands.parse(line.split())
    assert command.interpreter == interpreter
    assert command.flags == tuple(flags.split())
    assert (command.kind, command.target) == (kind, target)
    assert command.arguments == tuple(arguments.split())


def test_words_give_the_plain_command_back() -> None:
    for line in ("python -u a.py -x", "python -u -m mod -x", "python -c pass 1"):
        assert commands.parse(line.split()).words() == line.split()


REFUSED = [
    ("", "There is no command"),
    ("bash run.sh", "not a Python interpreter"),
    ("accelerate launch train.py", "not a Python interpreter"),
    ("pythonic x.py", "not a Python interpreter"),
    ("torchrun --nproc 2 train.py", "give the script directly"),
    ("python", "nothing to run"),
    ("python -u", "nothing to run"),
    ("python -", "runs no script"),
    ("python --version", "runs no script"),
    ("python -V", "leave out -V"),
    ("python -i x.py", "leave out -i"),
    ("python -m", "lacks what follows -m"),
    ("python -W", "lacks what follows -W"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_other_commands_are_refused_with_a_sentence(line: str, sentence: str) -> None:
    with pytest.raises(commands.CommandError, match=sentence):
        commands.parse(line.split())


def test_missing_files_are_named_and_what_to_do(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there.py").write_text("")
    (tmp_path / "folder").mkdir()

    def check(line: str) -> str:
        return interpreters.check_files(commands.parse(line.split()), os.environ["PATH"], str(tmp_path))

    assert os.path.isabs(check("python3 there.py"))
    for line, sentence in (
        ("python3 missing.py", "There is no file 'missing.py' in"),
        ("python3 folder", "is a folder: name the script in it"),
        ("python3.99 there.py", "not in any folder of PATH"),
        ("/nowhere/python there.py", "no such executable file"),
    ):
        with pytest.raises(commands.CommandError, match=sentence):
            check(line)


def test_an_interpreter_keeps_its_links(tmp_path: pathlib.Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "a.py").write_text("")
    command = commands.parse(["./python", "a.py"])
    previous = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert interpreters.check_files(command, "", str(tmp_path)) == f"{tmp_path}/./python"
    finally:
        os.chdir(previous)


def test_the_interpreter_is_asked_what_it_has(tmp_path: pathlib.Path) -> None:
    command = commands.parse([sys.executable, "-c", "pass"])
    runner = interpreters.find_runner(command, os.environ, str(tmp_path))
    assert runner.prefix == (sys.executable, "-m", "lastwords.trainer.runner")
    without_packages = commands.parse([sys.executable, "-S", "-c", "pass"])
    with pytest.raises(commands.CommandError, match="has no torch: install it there"):
        interpreters.find_runner(without_packages, os.environ, str(tmp_path))


def test_a_program_that_only_looks_like_python_is_refused(tmp_path: pathlib.Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho licence expired\nexit 3\n")
    fake.chmod(0o755)
    command = commands.parse([str(fake), "-c", "pass"])
    with pytest.raises(commands.CommandError, match=r"does not run Python code \(exit status 3\): licence expired"):
        interpreters.find_runner(command, os.environ, str(tmp_path))


def test_an_interpreter_without_lastwords_finds_it_last_on_its_path(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "_probe", lambda *_: ((3, 11), True, False))
    runner = interpreters.find_runner(commands.parse([sys.executable, "-c", "pass"]), os.environ, str(tmp_path))
    assert runner.prefix[1] == "-c"
    assert "sys.path.append(" in runner.prefix[2]
