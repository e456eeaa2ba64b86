"""Interpreter forms of the user's command, and what is asked of the interpreter."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import pytest

from lastwords.launcher import commands, interpreters
from lastwords.launcher.commands import Kind
from lastwords.launcher.interpreters import Found

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
def test_interpreters_that_run_no_script_are_refused_with_a_sentence(line: str, sentence: str) -> None:
    with pytest.raises(commands.CommandError, match=sentence):
        commands.parse(line.split())


ENV = [
    # words after `env`, variables, command; None: more than setting and removing
    ("A=1 B= python x.py C=3", {"A": "1", "B": ""}, "python x.py C=3"),
    ("-u A --unset=B -uC D=x=y python x.py", {"A": None, "B": None, "C": None, "D": "x=y"}, "python x.py"),
    ("-- A=1 -odd", {"A": "1"}, "-odd"),
    ("python x.py", {}, "python x.py"),
    ("A=1", {"A": "1"}, ""),
    ("-i python x.py", None, ""),
    ("-S python x.py", None, ""),
    ("--chdir=/ python x.py", None, ""),
]


@pytest.mark.parametrize(("line", "variables", "command"), ENV)
def test_env_is_taken_apart_where_it_only_sets_and_removes(
    line: str, variables: dict[str, str | None] | None, command: str
) -> None:
    prefix = commands.parse_env(["env", *line.split()])
    if variables is None:
        assert prefix is None
    else:
        assert prefix == commands.Prefix(variables=variables, words=command.split())


def test_a_local_rank_is_put_before_the_arguments_only_where_it_was_asked_for() -> None:
    plain = commands.parse(["python", "a.py", "-x"])
    assert plain.for_local_rank(1) is plain
    asked = dataclasses.replace(plain, local_rank_argument=True)
    assert asked.for_local_rank(1).words() == ["python", "a.py", "--local-rank=1", "-x"]


def test_missing_files_are_named_and_what_to_do(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there.py").write_text("")
    (tmp_path / "folder").mkdir()

    def check(line: str) -> str:
        return interpreters.check_files(commands.parse(line.split()), os.environ["PATH"], str(tmp_path))

    assert os.path.isabs(check("python3 there.py"))
    for line, sentence in (
        ("python3 missing.py", "There is no file 'missing.py' in"),
        ("python3 folder", "is a folder: name the script in it"),
        ("python3.99 there.py", "not in any folder of PATH, but 'python3' is"),
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


def test_without_any_python_on_the_path_the_sentence_says_what_to_do(tmp_path: pathlib.Path) -> None:
    command = commands.parse(["python", "a.py"])
    with pytest.raises(commands.CommandError, match="no other Python is. Activate the environment that has torch"):
        interpreters.check_files(command, str(tmp_path), str(tmp_path))


UNUSABLE = [
    (Found(python=(3, 9), torch="2.15.0", numpy=True, lastwords=True), "is Python 3.9: use 3.10 or newer"),
    (Found(python=(3, 11), torch=None, numpy=True, lastwords=True), "has no torch: install it there, or name the"),
    (Found(python=(3, 11), torch="2.5.1+cpu", numpy=True, lastwords=True), r"has torch 2.5.1\+cpu: .* 2.6 or newer"),
    (Found(python=(3, 11), torch="1.13.1", numpy=True, lastwords=True), "has torch 1.13.1"),
    (Found(python=(3, 11), torch="2.6.0", numpy=False, lastwords=True), "install numpy there"),
]


@pytest.mark.parametrize(("found", "sentence"), UNUSABLE)
def test_an_interpreter_that_cannot_run_ranks_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, found: Found, sentence: str
) -> None:
    monkeypatch.setattr(interpreters, "_probe", lambda *_: found)
    with pytest.raises(commands.CommandError, match=sentence):
        interpreters.find_runner(commands.parse([sys.executable, "-c", "pass"]), os.environ, str(tmp_path))


@pytest.mark.parametrize("torch", ["2.6.0", "2.15.0a0+git123", "3.0", ""])
def test_a_torch_that_is_new_enough_or_does_not_say_is_taken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    found = Found(python=(3, 10), torch=torch, numpy=True, lastwords=True)
    monkeypatch.setattr(interpreters, "_probe", lambda *_: found)
    command = commands.parse([sys.executable, "-c", "pass"])
    assert interpreters.find_runner(command, os.environ, str(tmp_path)).prefix[0] == sys.executable


def test_an_interpreter_without_lastwords_finds_it_last_on_its_path(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(python=(3, 11), torch="2.15.0", numpy=True, lastwords=False)
    monkeypatch.setattr(interpreters, "_probe", lambda *_: found)
    runner = interpreters.find_runner(commands.parse([sys.executable, "-c", "pass"]), os.environ, str(tmp_path))
    assert runner.prefix[1] == "-c"
    assert "sys.path.append(" in runner.prefix[2]
