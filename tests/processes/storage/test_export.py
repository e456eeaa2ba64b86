"""`lastwords checkpoints export` from a folder and from an object store, into a model of plain torch."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

from tests.processes.storage import s3
from tests.unit.trainer import test_exporting

pytestmark = pytest.mark.slow


def export(place: str, out: pathlib.Path, *options: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "lastwords_operator.cli", "checkpoints", "export", place, f"--to={out}", *options]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_from_an_object_store_and_what_cannot_be_is_said(tmp_path: pathlib.Path, server: s3.Server) -> None:
    from lastwords.protocol.manifest import CheckpointId
    from lastwords.storage import adopting
    from lastwords.storage.checkpoints import JobCheckpoints

    folder = test_exporting.save(tmp_path / "storage")
    place = server.prefix()
    here = JobCheckpoints.at(str(tmp_path / "storage"), "ns", "job")
    there = JobCheckpoints.at(place, "ns", "job")
    there.claim("uid")
    adopting.copy(here, there, CheckpointId(step=12, attempt=1))
    code, text = export(place, tmp_path / "out")
    assert (code, text) == (0, f"step-000000000012-a1 is in {tmp_path / 'out'}\n")
    test_exporting.same(torch.load(tmp_path / "out" / "state.pt", weights_only=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "storage"], "nothing else is left"
    code, text = export(str(folder), tmp_path / "out")
    assert (code, text) == (2, f"lastwords: {tmp_path / 'out'} is not empty: name a new folder with --to\n")
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, text = export(str(folder), tmp_path / "other")
    assert code == 2
    assert "step-000000000012-a1 could not be exported: " in text and "damaged" in text
