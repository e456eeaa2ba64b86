"""What makes a process unsafe to fork."""

from __future__ import annotations

import os
import pathlib

import pytest

from lastwords.trainer import forking


class _Driver:
    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cuCtxGetCurrent(self, context: object) -> int:
        return self.answer


def test_the_cuda_driver_is_asked_itself() -> None:
    assert forking.driver_reason(lambda: None) == ""  # not loaded
    assert forking.driver_reason(lambda: _Driver(3)) == ""  # loaded, and answers that nobody has initialised it
    for answer in (0, 201):  # a context, or an error that only an initialised driver gives
        assert "driver" in forking.driver_reason(lambda answer=answer: _Driver(answer))


def test_harmless_files_are_no_devices(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    harmless = [
        "/dev/null",
        "/dev/zero",
        "/dev/urandom",
        "/dev/pts/0",
        "/dev/shm/x",
        "pipe:[1]",
        str(tmp_path / "file"),
    ]
    assert list(forking.device_files(harmless)) == []
    assert list(forking.device_files(["/dev/no-such-device"])) == []


def test_a_device_is_one() -> None:
    names = ("nvidiactl", "kmsg", "fuse", "net/tun", "loop-control", "hwrng", "rtc0")
    found = [f"/dev/{name}" for name in names if os.path.exists(f"/dev/{name}")]
    if not found:
        pytest.skip("there is no device here")
    assert list(forking.device_files(found)) == found
