"""What is typed wrongly, or does not fit the folder, is one clear sentence and exit code 2; nothing is lost."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator

import pytest

from lastwords_operator import cli
from lastwords_operator.core.model import JobState, JobStatus
from lastwords_operator.local import asked, inject
from lastwords_operator.local.folder import JobFolder
from lastwords_operator.local.store import FileStatusStore

JOB = """\
apiVersion: lastwords.dev/v1alpha1
kind: FaultTolerantJob
metadata: {name: tiny}
spec:
  workers:
    replicas: 2
    processesPerWorker: 2
    template: {spec: {containers: [{name: trainer, command: [python, train.py], env: [{name: A, value: b}]}]}}
  checkpoint:
    storage: {uri: "file:///tmp/somewhere"}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    memory = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory))
    monkeypatch.chdir(tmp_path)
    yield memory
    shutil.rmtree(memory)


def call(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    try:
        code = cli.main(line)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["run"], "nothing to run: put the command after --"),
        (["run", "--workers", "0", "--", "python", "x.py"], "'0' must be at least 1"),
        (["run", "--workers", "two", "--", "python", "x.py"], "'two' is not a whole number"),
        (["run", "--save-every", "often", "--", "python", "x.py"], "neither seconds like 30s nor steps like 200steps"),
        (["run", "--save-every", "0s", "--", "python", "x.py"], "neither seconds like 30s nor steps like 200steps"),
        (["run", "--hang-seconds", "nan", "--", "python", "x.py"], "'nan' is not a number of seconds above 0"),
        (["run", "--name", "My Job", "--", "python", "x.py"], "--name 'My Job' must be small letters"),
        (["run", "--inject", "kill rank=9 at-step=1", "--", "python", "x.py"], "there is no rank 9; the last one is 0"),
        (["run", "--inject", "explode", "--", "python", "x.py"], "'explode' is not understood; write for example"),
        (["run", "-f", "absent.yaml"], "cannot read absent.yaml: No such file or directory"),
        (["run", "-f", "job.yaml", "--workers", "3"], "--workers and -f do not go together: write it into job.yaml"),
        (["run", "-f", "job.yaml", "--", "python", "x.py"], "a command and -f do not go together"),
        (["status"], "there is no job in .lastwords/; name its folder"),
        (["status", "nowhere"], "nowhere is not the folder of a job"),
        (["checkpoints", "list", "nowhere"], "nowhere is not a folder"),
        (["checkpoints", "verify", "."], "holds no checkpoints"),
        (
            ["checkpoints", "list", "nfs://host/x"],
            "nfs:// is not known; checkpoints go to a folder, or to file://, s3://",
        ),
        (["checkpoints"], "the following arguments are required: ACTION"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str], line: list[str], sentence: str) -> None:
    pathlib.Path("job.yaml").write_text(JOB)
    code, _, err = call(capsys, *line)
    assert code == cli.USAGE
    assert sentence in err
    assert "Traceback" not in err
    assert not pathlib.Path(".lastwords").exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("replicas: 2", "replica: 2", "job.yaml: spec.workers.replica: unknown key; did you mean replicas?"),
        ("replicas: 2", "replicas: many", "job.yaml: spec.workers.replicas: "),
        ("replicas: 2", "replicas: 0", "job.yaml: spec.workers.replicas: "),
        ("kind: FaultTolerantJob", "kind: Job", "job.yaml: kind: "),
        ("file:///tmp/somewhere", "nfs://host/x", "spec.checkpoint.storage.uri: nfs://host/x: nfs:// is not known"),
        ("file:///tmp/somewhere", "s3://", "spec.checkpoint.storage.uri: "),
        ("metadata: {name: tiny}", "", "job.yaml: metadata: missing"),
        ("spec:", "spec: [", "job.yaml, line "),
    ],
)
def test_a_job_file_with_a_mistake_names_the_path(
    capsys: pytest.CaptureFixture[str], old: str, new: str, sentence: str
) -> None:
    pathlib.Path("job.yaml").write_text(JOB.replace(old, new, 1))
    code, _, err = call(capsys, "run", "-f", "job.yaml")
    assert code == cli.USAGE
    assert sentence in err


def test_a_job_file_and_flags_mean_the_same(tmp_path: pathlib.Path) -> None:
    pathlib.Path("job.yaml").write_text(JOB)
    job = asked.ask(asked.Flags(argv=(), file=pathlib.Path("job.yaml")))
    assert (job.spec.workers, job.spec.processes_per_worker) == (2, 2)
    assert job.command == ("python", "train.py")
    assert job.environment == {"A": "b"}
    assert job.storage == "/tmp/somewhere"
    flags = asked.Flags(argv=("python", "train.py"), workers=2, procs=2, name="tiny", storage=job.storage)
    assert asked.ask(flags).record() | {"environment": {"A": "b"}} == job.record()
    assert job.folder == tmp_path / ".lastwords" / "tiny"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("python", "path/to/My_Train.py", "--x"), "my-train"),
        (("python", "-u", "train.py"), "train"),
        (("./run.sh",), "run-sh"),
        (("torchrun", "--nproc-per-node", "2", "train.py", "eval.py"), "train"),
        (("env", "A=1", "uv", "run", "train.py"), "train"),
        (("python", "___.py"), "job"),
    ],
)
def test_the_job_is_named_after_its_script(argv: tuple[str, ...], name: str) -> None:
    assert asked.ask(asked.Flags(argv=argv)).spec.name == name


@pytest.fixture
def never_ran() -> JobFolder:
    """A folder as a first run of `python -c pass` leaves it that was killed before anything started."""
    wanted = asked.ask(asked.Flags(argv=(sys.executable, "-c", "pass"), name="one"))
    wanted.folder.mkdir(parents=True)
    folder = JobFolder(wanted.folder)
    folder.job_file.write_text(json.dumps({"uid": "u", "asked": wanted.record()}))
    return folder


def line(*options: str) -> list[str]:
    return ["run", "--name", "one", *options, "--", sys.executable, "-c", "pass"]


@pytest.mark.parametrize(
    ("options", "different"),
    [
        (["--workers", "2"], "spec.workers was 1, is 2"),
        (["--max-restarts", "3"], "spec.policy.max_restarts was 10, is 3"),
        (["--storage", "elsewhere"], "storage was "),
    ],
)
def test_another_job_in_the_same_folder_is_refused_with_what_differs(
    capsys: pytest.CaptureFixture[str], never_ran: JobFolder, options: list[str], different: str
) -> None:
    before = never_ran.job_file.read_bytes()
    code, _, err = call(capsys, *line(*options))
    assert code == cli.USAGE
    assert "holds another job" in err
    assert different in err
    assert "give --dir another folder" in err
    assert never_ran.job_file.read_bytes() == before
    assert never_ran.locked_by() is None


async def _save(folder: JobFolder, status: JobStatus) -> None:
    await FileStatusStore(folder).save(status, 0)


async def test_a_complete_job_says_so_and_is_not_run_again(
    capsys: pytest.CaptureFixture[str], never_ran: JobFolder
) -> None:
    await _save(never_ran, JobStatus(state=JobState.COMPLETE, progress_step=60))
    code, out, _ = call(capsys, *line())
    assert code == 0
    assert "the job is complete already, at step 60; use another --dir" in out


def test_a_damaged_status_is_refused(capsys: pytest.CaptureFixture[str], never_ran: JobFolder) -> None:
    never_ran.status_file.write_text("{")
    code, _, err = call(capsys, *line())
    assert code == cli.USAGE
    assert "status.json is damaged" in err


def test_storage_that_cannot_be_written_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("blocked").write_text("a file, not a folder")
    code, _, err = call(capsys, *line("--storage", "blocked"))
    assert code == cli.USAGE
    assert "cannot write to the storage" in err
    assert "name another --storage" in err


def test_too_little_memory_is_refused_with_the_figures(
    capsys: pytest.CaptureFixture[str], home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastwords_operator.local.run.memory_room", lambda folder: (4_000_000, 0))
    code, _, err = call(capsys, *line("--memory-dir", str(home)))
    assert code == cli.USAGE
    assert "4 MB free" in err
    assert "--memory-dir" in err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code, _, err = call(capsys, *line())
    tmp_path.chmod(0o700)
    assert code == cli.USAGE
    assert "cannot make the job folder" in err


@pytest.mark.parametrize("command", [[], ["run"], ["status"], ["checkpoints"], ["checkpoints", "list"], ["version"]])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = call(capsys, *command, "--help")
    assert code == 0
    assert "example" in out
    assert f"lastwords {' '.join(command)}".strip() in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "version")[:2] == (0, "lastwords 0.1.0\n")


def test_examples_of_inject_in_the_help_are_understood() -> None:
    for text in inject.EXAMPLE.split("'")[1::2]:
        inject.parse(text, workers=2, procs=2)


def test_checkpoints_of_a_job_folder_are_those_of_its_storage(
    capsys: pytest.CaptureFixture[str], never_ran: JobFolder
) -> None:
    storage = never_ran.path / "checkpoints" / "default" / "one"
    storage.mkdir(parents=True)
    (storage / "job.json").write_text("{}")
    assert call(capsys, "checkpoints", "list", str(never_ran.path))[:2] == (0, "no committed checkpoint\n")
    code, _, err = call(capsys, "checkpoints", "verify", str(never_ran.path))
    assert code == cli.USAGE
    assert "no committed checkpoint" in err
