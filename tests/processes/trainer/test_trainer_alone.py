"""The same script under plain python: with a storage folder it keeps itself, without one it says that nothing does."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.trainer import standalone

REFERENCE = pathlib.Path(__file__).parents[2] / "reference" / "train_reference.py"


def run(out: pathlib.Path, steps: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REFERENCE), "--steps", str(steps), "--schedule-steps", "30", "--out", str(out)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LASTWORDS_")}
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=100, check=True
    )


@pytest.mark.slow
def test_a_storage_folder_is_enough_to_save_and_restore(tmp_path: pathlib.Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", 30)
    assert undisturbed.stderr.count("nothing protects this run") == 1
    storage = {"LASTWORDS_STORAGE": str(tmp_path / "storage"), "LASTWORDS_SAVE_EVERY_STEPS": "5"}
    run(tmp_path / "first", 13, **storage)
    kept = JobCheckpoints.at(str(tmp_path / "storage"), standalone.NAMESPACE, standalone.JOB)
    found = [info.id for info in kept.list_checkpoints()]
    assert [(c.step, c.attempt) for c in found] == [(5, 1), (10, 1), (13, 1)]
    assert all(kept.verify(checkpoint) == [] for checkpoint in found)

    # The newest one is damaged: the run says so and goes on from the one before.
    data = tmp_path / "storage" / standalone.NAMESPACE / standalone.JOB / found[-1].folder / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-50] ^= 1
    data.write_bytes(content)
    second = run(tmp_path / "second", 30, **storage)
    assert "cannot be restored" in second.stderr and "block 0 is damaged" in second.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "second.rank0.jsonl").read_text().splitlines()]
    assert steps == list(range(10, 30))
    results = [json.loads((tmp_path / name).read_text())["sha256"] for name in ("undisturbed", "second")]
    assert results[0] == results[1]
