"""
Ctrl-C, SIGTERM and SIGHUP that come before somebody is there to answer them.

A job's workers may be running already when `lastwords run` starts. A signal in its first second must stop the job
with last words, like any other, and not just end the command with a traceback.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_early: list[str] = []


def wanted() -> list[signal.Signals]:
    """The signals to answer: not those that are ignored on purpose (nohup, a shell's background job)."""
    return [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Note the signals in place of dying of them; the old handlers come back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    old = {number: signal.signal(number, _note) for number in wanted()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        _early.clear()


@contextlib.contextmanager
def deadly() -> Iterator[None]:
    """For what may just be broken off: the signals raise KeyboardInterrupt, those that came before too."""
    if _early:
        raise KeyboardInterrupt
    numbers = wanted() if threading.current_thread() is threading.main_thread() else []
    old = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def early() -> list[str]:
    """Names of the signals that came so far, in order; each is told once."""
    names = list(_early)
    _early.clear()
    return names


def _note(number: int, _: Any) -> None:
    _early.append(NAMES[signal.Signals(number)])
