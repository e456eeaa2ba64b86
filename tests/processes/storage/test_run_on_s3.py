"""`lastwords run` with its checkpoints in an object store: saved there, restored from there, to the last bit."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

from tests.processes.run import cases
from tests.processes.storage import s3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def checkpoints(action: str, place: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "lastwords_operator.cli", "checkpoints", action, place]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_job_saves_to_s3_and_goes_on_from_there(server: s3.Server, run: cases.Run, reference: pathlib.Path) -> None:
    place = server.prefix()
    first = run.start([f"--storage={place}"])
    run.until_step(20)
    first.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    run.left_nothing()
    run.out.unlink(missing_ok=True)  # the script wrote it when its steps ended early
    run.start([f"--storage={place}"])
    assert run.wait() == 0, run.text()
    run.equals(reference)
    run.left_nothing()

    code, text = checkpoints("list", place)
    assert code == 0, text
    assert "default/job" in text and str(cases.STEPS) in text and "final" in text
    newest = text.split()[-1]
    for where in (f"{place}/default", f"{place}/default/job/{newest}", str(run.job)):
        code, text = checkpoints("verify", where)
        assert code == 0, text
        assert f"{newest}: whole" in text
    code, text = checkpoints("show", place)
    assert code == 0, text
    assert "saved by 2 workers with 2 ranks each" in text


def test_a_bucket_that_is_not_there_is_refused_at_the_start(server: s3.Server, run: cases.Run) -> None:
    run.start(["--storage=s3://no-such-bucket/x"])
    assert run.wait(30) == 2
    assert "cannot write to the storage: writing s3://no-such-bucket/x/" in run.console.read_text()
    assert "make the bucket first; name another --storage" in run.console.read_text()
    code, text = checkpoints("list", "s3://no-such-bucket/x")
    assert code == 2
    assert "make the bucket first" in text
