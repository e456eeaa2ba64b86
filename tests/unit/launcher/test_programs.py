"""Which of the three kinds a command is: taken apart, translated, or run as it is."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import pytest

from lastwords.launcher import programs
from lastwords.launcher.commands import CommandError, Kind
from lastwords.launcher.programs import Program
from lastwords.launcher.torchrun import Size

SIZE = Size(workers=1, processes=2)


def executable(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with scripts, and `bin` with what an environment has."""
    executable(tmp_path / "bin" / "python", "#!/bin/sh\n")
    executable(tmp_path / "bin" / "python3", "#!/bin/sh\n")
    executable(tmp_path / "bin" / "torchrun", f"#!{tmp_path}/bin/python3\n")
    executable(tmp_path / "bin" / "tool", f"#!{tmp_path}/bin/python -I\n")
    executable(tmp_path / "bin" / "accelerate", f"#!{tmp_path}/bin/python\n")
    executable(tmp_path / "bin" / "conda", "#!/bin/sh\n")
    executable(tmp_path / "run.sh", "#!/bin/bash\npython train.py\n")
    executable(tmp_path / "direct", "#!/usr/bin/env python3\n")
    executable(tmp_path / "split", "#!/usr/bin/env -S python -u -X dev\n")
    executable(tmp_path / "long", f"#!/bin/sh\n'''exec' \"{tmp_path}/bin/python\" \"$0\" \"$@\"\n' '''\n")
    executable(tmp_path / "other", "#!/usr/bin/env node\n")
    executable(tmp_path / "bare", "python train.py\n")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def resolve(place: pathlib.Path, line: str, **variables: str) -> Program:
    environment = {"PATH": f"{place}/bin:{os.environ['PATH']}", **variables}
    return programs.resolve(line.split(), environment, str(place), SIZE)


TAKEN = [
    # command, interpreter, flags, kind, target, arguments; BIN is the environment's folder
    ("python train.py", "python", "", Kind.SCRIPT, "train.py", ""),
    ("env A=1 python -u train.py x", "python", "-u", Kind.SCRIPT, "train.py", "x"),
    ("env A=1 env -u B python -m mod", "python", "", Kind.MODULE, "mod", ""),
    ("./direct --x 1", "python3", "", Kind.SCRIPT, "./direct", "--x 1"),
    ("./split a", "python", "-u -X dev", Kind.SCRIPT, "./split", "a"),
    ("./long a", "BIN/python", "", Kind.SCRIPT, "./long", "a"),
    ("env A=1 ./direct", "python3", "", Kind.SCRIPT, "./direct", ""),
    ("tool sub --x", "BIN/python", "-I", Kind.SCRIPT, "BIN/tool", "sub --x"),
    ("torchrun --nproc-per-node 2 train.py a", "BIN/python3", "-u", Kind.SCRIPT, "train.py", "a"),
    ("python3 -X dev -m torch.distributed.run -m mod a", "python3", "-u", Kind.MODULE, "mod", "a"),
    ("python -m torch.distributed.launch --use_env a.py", "python", "-u", Kind.SCRIPT, "a.py", ""),
]


@pytest.mark.parametrize(("line", "interpreter", "flags", "kind", "target", "arguments"), TAKEN)
def test_python_is_found_behind_env_first_lines_and_torchrun(
    place: pathlib.Path, line: str, interpreter: str, flags: str, kind: Kind, target: str, arguments: str
) -> None:
    program = resolve(place, line)
    command = program.command
    assert command is not None and program.wrapped is None
    assert command.interpreter == interpreter.replace("BIN", f"{place}/bin")
    assert (command.flags, command.kind) == (tuple(flags.split()), kind)
    assert command.target == target.replace("BIN", f"{place}/bin")
    assert command.arguments == tuple(arguments.split())
    assert list(program.notices) == (["torchrun"] if "torch" in line else [])


def test_what_env_sets_reaches_the_ranks_and_decides_which_python_is_found(place: pathlib.Path) -> None:
    program = resolve(place, "env -u B A=1 A=2 python train.py")
    assert program.variables == {"A": "2", "B": None}
    assert programs.with_variables({"B": "1", "C": "3"}, program.variables) == {"A": "2", "C": "3"}
    executable(place / "else" / "tool", "#!/bin/sh\n")
    assert resolve(place, f"env PATH={place}/else tool").wrapped is not None


def test_torchrun_takes_the_interpreter_that_its_own_variable_names(place: pathlib.Path) -> None:
    command = resolve(place, "torchrun a.py", PYTHON_EXEC="/opt/python").command
    assert command is not None and command.interpreter == "/opt/python"


WRAPPED = [
    "./run.sh --x", "bash run.sh", "sh -c true", "conda run -n x python train.py", "make -f x", "true", "./other",
    "accelerate launch train.py", "python -m accelerate.commands.launch train.py", "nice -n 5 python train.py",
    "env -i python train.py", "env A=1 bash run.sh", "torchrun --no-python ./run.sh", "torchrun --unheard a.py",
]  # fmt: skip


@pytest.mark.parametrize("line", WRAPPED)
def test_everything_else_is_run_as_it_is_and_the_user_is_told(place: pathlib.Path, line: str) -> None:
    program = resolve(place, line)
    assert program.command is None and program.wrapped is not None
    assert program.wrapped.words == tuple(line.split())
    assert os.access(place / program.wrapped.path, os.X_OK)
    assert "no warm start" in program.notices["wrapped"]
    assert line in program.notices["wrapped"]


REFUSED = [
    ("", "There is no command: put it after `--`"),
    ("pythom train.py", "'pythom' cannot be run: it is not in any folder of PATH. Check its name"),
    ("./absent.sh", "'./absent.sh' cannot be run: there is no such file"),
    ("train.py --x", "write `python train.py …`"),
    ("./train.py", "cannot be run by itself: write `python ./train.py …`, or make it executable"),
    ("./bare", "without a first line that says what runs it: write `bash ./bare …`"),
    ("A=1 python train.py", "only a shell understands: write `env A=1 …`"),
    ("env", "`env` is given nothing to run"),
    ("env A=1", "`env` is given nothing to run"),
    ("torchrun", "`torchrun` is given nothing to run"),
    ("torchrun --nproc-per-node 4 train.py", "make them equal"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_what_cannot_run_is_refused_with_what_to_do(place: pathlib.Path, line: str, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        resolve(place, line)
    error = programs.load(line.split(), {"PATH": f"{place}/bin"}, str(place), SIZE).error
    assert error


def test_first_lines_are_read_as_the_kernel_reads_them(place: pathlib.Path) -> None:
    for line, expected in (
        ("#!/bin/sh", ["/bin/sh"]),
        ("#! /bin/sh  -e -x ", ["/bin/sh", "-e -x"]),
        ("#!/usr/bin/env -S'A=1' python -u", ["/usr/bin/env", "A=1", "python", "-u"]),
        ("#!/usr/bin/env -S 'open", []),
        ("no script", []),
    ):
        assert programs.read_shebang(str(executable(place / "x", line + "\nbody\n"))) == expected
    assert programs.read_shebang(str(place / "absent")) == []
    assert programs.read_shebang(sys.executable) == []


def test_torchs_own_console_script_is_translated(tmp_path: pathlib.Path) -> None:
    torchrun = shutil.which("torchrun", path=os.path.dirname(sys.executable))
    assert torchrun is not None
    program = programs.load([torchrun, "--nproc-per-node=2", "-m", "this"], os.environ, str(tmp_path), SIZE)
    assert program.error == ""
    assert program.runner is not None
    assert os.path.samefile(program.runner.prefix[0], sys.executable)
