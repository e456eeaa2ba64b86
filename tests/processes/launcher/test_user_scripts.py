"""The user's script runs as under plain python, and however it ends, the agent hears it and the exit code is right."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import venv
from typing import Any

import pytest

import lastwords
from lastwords.protocol import wire
from lastwords.protocol.messages import ExitReport
from tests.processes.launcher.fake_agent import FakeAgent, Launched, end, order, until, worker

pytestmark = pytest.mark.slow  # each starts interpreters with torch

SHOW = """
import json, os, subprocess, sys, threading
main = sys.modules["__main__"]
print("SEEN " + json.dumps({
    "main": sorted(vars(main)), "same": vars(main) is globals(), "name": __name__, "doc": __doc__,
    "package": __package__,
    "file": globals().get("__file__"), "cached": repr(globals().get("__cached__")), "loader": type(__loader__).__name__,
    "spec": __spec__ and [__spec__.name, __spec__.origin], "argv": sys.argv, "orig_argv": sys.orig_argv,
    "path": sys.path, "flags": repr(sys.flags), "warnings": sys.warnoptions, "xoptions": repr(sys._xoptions),
    "executable": sys.executable, "folder": os.getcwd(), "main_thread": threading.current_thread().name,
    "priority": os.getpriority(os.PRIO_PROCESS, 0), "stdin": os.readlink("/proc/self/fd/0"),
    "pipe": signal_state(), "environment": {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)},
    # What a library put into the C library's environment only shows in child processes.
    "inherited": sorted(
        line for line in subprocess.check_output(["env"], text=True).splitlines() if not line.startswith(HIDDEN)
    ),
}))
"""
PRELUDE = '''"""What it is."""
import signal
HIDDEN = (
    "LASTWORDS_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM", "GROUP_", "ROLE_", "LOCAL_",
    "RANK", "WORLD_SIZE",
)
def signal_state():
    return [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)]
'''

FORMS = {
    "script": ["./script.py", "a", "-b"],
    "flags": ["-W", "ignore", "-O", "-X", "faulthandler", "sub/../script.py"],
    "isolated": ["-I", "script.py"],
    "module": ["-m", "package.tool", "a"],
    "package": ["-u", "-m", "package", "a"],
    "code": ["-c", PRELUDE + SHOW, "a"],
    "first line behind env": ["env", "-u", "SHLVL", "PATH={folder}/other/bin:/usr/bin:/bin", "./tool", "a"],
}


def _write(folder: pathlib.Path) -> None:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "__init__.py").write_text("")
    for name in ("script.py", "package/tool.py", "package/__main__.py"):
        (folder / name).write_text(PRELUDE + SHOW)
    # Another Python than the launcher's, which only the command's own PATH leads to.
    (folder / "tool").write_text(f"#!/usr/bin/env -S python -u -W ignore\n{PRELUDE}{SHOW}")
    (folder / "tool").chmod(0o755)
    venv.create(folder / "other", symlinks=True)
    packages = [sysconfig.get_path("purelib"), str(pathlib.Path(lastwords.__file__).parents[1])]
    next((folder / "other").glob("lib/*/site-packages")).joinpath("all.pth").write_text("\n".join(packages))


def _seen(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if line.startswith("SEEN "))
    found: dict[str, Any] = json.loads(line[5:])
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_standby_leaves_no_trace_in_the_script(tmp_path: pathlib.Path, form: str) -> None:
    _write(tmp_path)
    words = [word.replace("{folder}", str(tmp_path)) for word in FORMS[form]]
    command = words if words[0] == "env" else [sys.executable, *words]
    plain = subprocess.run(
        command,
        cwd=tmp_path,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    launched = Launched(tmp_path, command, procs=1, variables={})
    agent = FakeAgent(launched.volume)
    try:
        agent.processes(lambda r: r.standbys == 1, "a standby is ready")
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is None
        assert agent.dead(0, 1).code == 0
        ours, theirs = _seen(launched.log(0, 1)), _seen(plain.stdout)
        for name in ours:
            assert ours[name] == theirs[name], (name, _difference(ours[name], theirs[name]))
        assert ours.keys() == theirs.keys()
    finally:
        end(launched, agent)


def test_an_interpreter_that_lacks_lastwords_gets_it_at_the_end_of_its_path(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("import sys, lastwords; print(sys.path, flush=True)")
    patch = (
        "import lastwords.launcher.interpreters as i\n"
        "i._probe = lambda *_: i.Found(python=(3, 11), torch='2.15.0', numpy=True, lastwords=False)"
    )
    launched = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={}, patch=patch)
    agent = FakeAgent(launched.volume)
    try:
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is None, launched.log(0, 1)
        agent.dead(0, 1)
        path = ast.literal_eval(launched.log(0, 1))
        assert path[0] == str(tmp_path)
        assert (pathlib.Path(path[-1]) / "lastwords" / "__init__.py").is_file()
    finally:
        end(launched, agent)


CHILDREN = """
import multiprocessing, os, sys, torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(float(index * index))

def work(number):
    return number + 1, os.environ["RANK"], __name__

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(work, [1, 2]), flush=True)
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
        print(method, [batch.sum().item() for batch in loader], flush=True)
    # Processes that the script does not end itself are ended as under plain python.
    multiprocessing.get_context("fork").Process(target=__import__("time").sleep, args=(1000,), daemon=True).start()
"""


@pytest.mark.parametrize("standby", [True, False], ids=["standby", "cold"])
def test_loader_and_other_children_work_by_fork_and_spawn(tmp_path: pathlib.Path, standby: bool) -> None:
    with worker(tmp_path, CHILDREN, procs=1) as (launched, agent):
        if standby:
            agent.processes(lambda r: r.standbys == 1, "a standby is ready")
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is None, launched.log(0, 1)
        assert agent.dead(0, 1).code == 0
        lines = launched.log(0, 1).splitlines()
        assert lines == [
            "fork [(2, '0', '__main__'), (3, '0', '__main__')]",
            "fork [14.0, 126.0]",
            "spawn [(2, '0', '__mp_main__'), (3, '0', '__mp_main__')]",
            "spawn [14.0, 126.0]",
            "forkserver [(2, '0', '__mp_main__'), (3, '0', '__mp_main__')]",
            "forkserver [14.0, 126.0]",
        ]


ENDS = """
import sys
how = sys.argv[1]
if how == "return": pass
elif how == "exit": sys.exit()
elif how == "exit0": sys.exit(0)
elif how == "exit3": sys.exit(3)
elif how == "exit256": sys.exit(256 + 7)
elif how == "text": sys.exit("no data found")
elif how == "error": raise ValueError("bad input")
elif how == "interrupt": raise KeyboardInterrupt
"""

ENDINGS: list[tuple[str, ExitReport | None, int | None, int | None]] = [
    ("return", None, 0, None),
    ("exit", None, 0, None),
    ("exit0", None, 0, None),
    ("exit3", ExitReport(code=3), 3, None),
    ("exit256", ExitReport(code=7), 7, None),
    ("text", ExitReport(code=1, message="no data found"), 1, None),
    ("error", ExitReport(code=1, exception="ValueError", message="bad input"), 1, None),
    ("interrupt", ExitReport(code=130, exception="KeyboardInterrupt"), None, signal.SIGINT),
]


@pytest.mark.parametrize(("how", "report", "code", "number"), ENDINGS, ids=[row[0] for row in ENDINGS])
def test_every_ending_is_told_and_gives_pythons_exit_code(
    tmp_path: pathlib.Path, how: str, report: ExitReport | None, code: int | None, number: int | None
) -> None:
    (tmp_path / "script.py").write_text(ENDS)
    plain = subprocess.run([sys.executable, "script.py", how], cwd=tmp_path, capture_output=True, text=True)
    assert plain.returncode == (-number if number else code)
    with worker(tmp_path, ENDS, how) as (launched, agent):
        agent.launcher.send(order(1, 1))
        told = agent.ended(0, 1).exit
        dead = agent.dead(0, 1)
        assert (dead.code, dead.signal) == (code, number)
        if report is None or told is None:
            assert told is report
        else:
            assert (told.code, told.exception, told.message) == (report.code, report.exception, report.message)
            assert not told.secondary and told.step is None
        # What python prints, it prints: to the letter, so without any frame of ours.
        until(lambda: launched.log(0, 1) == plain.stderr, "the same on stderr", 5)
        if told is not None and told.exception:
            assert told.traceback == plain.stderr


def test_a_syntax_error_in_the_script_is_shown_as_python_shows_it(tmp_path: pathlib.Path) -> None:
    broken = "x = 1\nif x\n    pass\n"
    with worker(tmp_path, broken) as (launched, agent):
        agent.launcher.send(order(1, 1))
        told = agent.ended(0, 1).exit
        assert told is not None and told.exception == "SyntaxError" and told.code == 1
        assert agent.dead(0, 1).code == 1
        plain = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
        assert launched.log(0, 1) == plain.stderr
        assert "runner" not in told.traceback and "line 2" in told.traceback


def test_a_failed_rank_keeps_its_process_until_it_may_exit(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("raise RuntimeError('x')")
    launched = Launched(tmp_path, [sys.executable, "script.py"], procs=1, variables={})
    agent = FakeAgent(launched.volume, may_exit=False)
    try:
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is not None
        assert "RuntimeError: x" in until(lambda: launched.log(0, 1), "the error is shown at once")
        assert agent.launcher.of(wire.Processes)[-1].processes[0].alive
        agent.rank(0, 1).send(wire.MayExit())
        assert agent.dead(0, 1).code == 1
    finally:
        end(launched, agent)


def test_what_python_does_at_its_end_is_done(tmp_path: pathlib.Path) -> None:
    script = """
import atexit, gzip, os, tempfile, threading, time, weakref
atexit.register(lambda: open("atexit", "w").write("ran"))
folder = tempfile.TemporaryDirectory(dir=".", prefix="temporary-")
text = open("text", "w"); text.write("not closed")
packed = gzip.open("packed.gz", "wt"); packed.write("not closed either")
print("no newline at the end", end="")
def late():
    time.sleep(0.3)
    open("thread", "w").write("ran")
threading.Thread(target=late).start()
"""
    with worker(tmp_path, script) as (launched, agent):
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is None
        assert (tmp_path / "thread").read_text() == "ran"  # its threads are still the script
        assert agent.dead(0, 1).code == 0
        assert (tmp_path / "atexit").read_text() == "ran"
        assert (tmp_path / "text").read_text() == "not closed"
        packed = subprocess.run(["gzip", "-dc", "packed.gz"], cwd=tmp_path, capture_output=True, text=True)
        assert (packed.stdout, packed.returncode) == ("not closed either", 0)
        assert not list(tmp_path.glob("temporary-*"))
        until(lambda: launched.log(0, 1) == "no newline at the end", "the last piece of a line is kept", 5)
        until(lambda: "[rank 0] no newline at the end\n" in launched.output, "and shown", 5)


def test_a_process_that_the_script_forks_is_not_the_ranks_ending(tmp_path: pathlib.Path) -> None:
    script = """
import os, sys
if os.fork() == 0:
    sys.exit(9)
_, status = os.wait()
print("child", os.waitstatus_to_exitcode(status), flush=True)
if os.fork() == 0:
    raise ValueError("in the child")
_, status = os.wait()
print("child", os.waitstatus_to_exitcode(status), flush=True)
"""
    with worker(tmp_path, script) as (launched, agent):
        agent.launcher.send(order(1, 1))
        assert agent.ended(0, 1).exit is None
        assert len(agent.rank(0, 1).of(wire.ScriptEnded)) == 1
        assert agent.dead(0, 1).code == 0
        assert "child 9" in launched.log(0, 1) and "child 1" in launched.log(0, 1)


GLOO = """
import datetime, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.ones(1000)
print("together", os.environ["MASTER_PORT"], flush=True)
while True:
    dist.all_reduce(value)
    value.zero_()
"""


def test_o22_the_survivor_of_a_killed_peer_reports_a_secondary_error(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, GLOO, procs=2) as (launched, agent):
        agent.launcher.send(order(1, 2))
        pids = agent.running(1, 2)
        for rank in range(2):
            _together(launched, rank, 1)
        os.kill(pids[1], signal.SIGKILL)
        told = agent.ended(0, 1).exit
        assert told is not None and told.secondary, told
        assert "gloo" in told.message or "peer" in told.message
        assert "script.py" in told.traceback


def test_o18_each_attempt_has_a_port_and_a_store_of_its_own(tmp_path: pathlib.Path) -> None:
    with worker(tmp_path, GLOO, procs=2) as (launched, agent):
        ports = []
        for attempt in (1, 2, 7):
            agent.launcher.send(order(attempt, 2))
            agent.running(attempt, 2)
            for rank in range(2):
                _together(launched, rank, attempt)
            assert launched.log(0, attempt) == launched.log(1, attempt)
            ports.append(launched.log(0, attempt).split()[1])
            (hello,) = agent.rank(0, attempt).of(wire.RankHello)
            assert hello.store_address == f"127.0.0.1:{ports[-1]}"
        assert len(set(ports)) == 3


def _together(launched: Launched, rank: int, attempt: int) -> None:
    until(lambda: "together" in launched.log(rank, attempt), f"rank {rank} of attempt {attempt} trains")


def _difference(ours: Any, theirs: Any) -> Any:
    return sorted(set(ours.items()) ^ set(theirs.items())) if isinstance(ours, dict) else ""
