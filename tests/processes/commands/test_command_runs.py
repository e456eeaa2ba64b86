"""
Each kind of command under `lastwords run`: a rank is killed, and the run equals the undisturbed one to the last bit.

The reference model is the same for all, so one undisturbed run does for all.
"""

from __future__ import annotations

import pathlib
import shlex
import sys

import pytest

from tests.processes.commands import support
from tests.processes.run import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return support.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    """A PATH whose first folder has the test's executables and this environment's python and torchrun."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(tmp_path, "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "torchrun").symlink_to(pathlib.Path(sys.executable).with_name("torchrun"))
    return f"{folder}:/usr/bin:/bin"


def executable(folder: pathlib.Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def test_a_console_script_behind_env_is_forked_like_any_python(
    run: cases.Run, reference: pathlib.Path, path: str
) -> None:
    tool = f"#!{sys.executable}\nimport runpy, sys\nrunpy.run_path({str(cases.REFERENCE)!r}, run_name='__main__')\n"
    executable(run.folder, "tool", tool)
    # The variable is one that a library reads when it is loaded, so it has to be there before the fork.
    command = ["env", "-u", "NOT_SET", "OMP_NUM_THREADS=1", "tool", *support.SCRIPT, f"--out={run.out}"]
    support.start(run, command, workers=2, variables={"PATH": path})
    support.went_on(run, reference)
    assert "wrapped" not in run.console.read_text()


def test_torchrun_is_translated_and_says_which_options_have_no_effect(
    run: cases.Run, reference: pathlib.Path, path: str
) -> None:
    command = ["torchrun", "--nproc-per-node=2", "--max-restarts=3", "--standalone", str(cases.REFERENCE)]
    support.start(run, [*command, *support.SCRIPT, f"--out={run.out}"], workers=1, variables={"PATH": path})
    support.went_on(run, reference)
    text = run.console.read_text()
    assert "torchrun itself is not run" in text
    assert "no effect here: --max-restarts, --standalone" in text


def test_a_torchrun_inside_of_a_shell_script_joins_the_job(run: cases.Run, reference: pathlib.Path, path: str) -> None:
    rest = shlex.join([str(cases.REFERENCE), *support.SCRIPT, f"--out={run.out}"])
    (run.folder / "run.sh").write_text(
        f"set -e\ncd /\ntorchrun {rest}\necho after $PET_NODE_RANK > {run.folder}/after\n"
    )
    support.start(run, ["bash", "run.sh"], workers=1, variables={"PATH": path})
    recovery = support.went_on(run, reference)
    assert "was killed (SIGKILL)" in recovery["message"]
    assert (run.folder / "after").read_text() == "after 0\n"  # what comes after training is not cut off
    events = run.console.read_text()
    assert "`bash run.sh` is run as it is" in events
    assert "no warm start" in events
    (warm,) = [row for row in run.status()["conditions"] if row["type"] == "WarmStart"]
    assert (warm["status"], warm["reason"]) == (False, "Wrapped")


CONDA = """#!/bin/bash
# Like the real one: a child of a child, which does not replace this process, in an environment of its own.
[ "$1 $2 $3" = "run -n train" ] || exit 64
shift 3
env CONDA_PREFIX=/nowhere bash -c '"$@"; exit $?' conda "$@"
"""
UV = """#!/bin/bash
[ "$1" = run ] || exit 64
shift
"$@" &
trap 'kill -TERM $!' TERM
wait $!
"""


def test_one_rank_per_worker_below_conda_run_and_uv_run_needs_no_torchrun(
    run: cases.Run, reference: pathlib.Path, path: str
) -> None:
    executable(run.folder, "conda", CONDA)
    executable(run.folder, "uv", UV)
    command = ["conda", "run", "-n", "train", "uv", "run", "python", str(cases.REFERENCE), *support.SCRIPT]
    support.start(run, [*command, f"--out={run.out}"], workers=2, variables={"PATH": path})
    support.went_on(run, reference)
