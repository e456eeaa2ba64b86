"""A short storm in every test run; `make storm` is the long one."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

RUN = pathlib.Path(__file__).with_name("run.py")


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_short_storm_loses_nothing() -> None:
    """Eight kills of ranks, launchers, agents and the coordinator, seeded; the proof is that of the long storm."""
    command = [sys.executable, str(RUN), "--kills=8", "--per-window=0", "--width=400", "--seed=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "bit-equal" in done.stdout
