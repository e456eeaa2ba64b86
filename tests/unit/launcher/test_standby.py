"""A standby from the moment it is asked for: what is done to it before it is born takes effect."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from lastwords.launcher.children import Child
from lastwords.launcher.output import Console, Stream
from lastwords.launcher.standby import Standby


@pytest.fixture
def ends() -> Iterator[tuple[Standby, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader, writer = os.pipe()
    yield Standby(stream=Stream(reader, Console(2)), channel=ours, at_load={}), theirs
    for end in (ours, theirs):
        end.close()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_one_that_nobody_is_making_yet_is_called_off(ends: tuple[Standby, socket.socket]) -> None:
    standby, _ = ends
    told: list[int] = []
    standby.on_exit = lambda: told.append(standby.pid)
    standby.requested = False
    assert standby.alive and not standby.gone()
    standby.kill()
    assert (standby.alive, standby.gone(), standby.signal, standby.code) == (False, True, signal.SIGKILL, None)
    standby.lose()
    assert told == [0]  # once


def test_one_that_is_being_made_gets_its_signal_at_its_birth(ends: tuple[Standby, socket.socket]) -> None:
    standby, _ = ends
    standby.signal_group(signal.SIGTERM)
    assert standby.alive and not standby.gone()  # it may still come
    with subprocess.Popen(["sleep", "100"], process_group=0) as process:
        standby.born(Child(process.pid, lambda _: None))
        assert process.wait(10) == -signal.SIGTERM


def test_one_that_never_comes_ends_like_a_process_that_cannot_be_started(ends: tuple[Standby, socket.socket]) -> None:
    standby, _ = ends
    standby.lose()
    assert (standby.alive, standby.gone(), standby.signal, standby.code) == (False, True, None, 126)


def test_what_it_says_is_taken_by_lines_however_they_come(ends: tuple[Standby, socket.socket]) -> None:
    standby, theirs = ends
    assert standby.hear() == ([], True)
    theirs.send(b"born 12\nrea")
    assert standby.hear() == (["born 12"], True) and not standby.ready
    theirs.send(b"dy\ntaken\n")
    theirs.close()
    assert standby.hear() == (["ready", "taken"], False)
    assert standby.ready and standby.taken
