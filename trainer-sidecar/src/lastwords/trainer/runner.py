"""
The program inside each rank process: `python -m lastwords.trainer.runner (--zygote | --standby) FD --parent PID`.

It loads torch and what is imported late ahead of time, waits until the launcher says over the descriptor which
rank it is, runs the user's script as `__main__`, and tells the agent how that ended before it leaves.
Nothing of this shows in the script: its arguments, paths, environment and `__main__` are those of plain python.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from lastwords.trainer import forking

_LOWEST_PRIORITY = 19
_PREWARM = (
    "torch",
    "torch.distributed",
    "lastwords.trainer.session",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.optim.lr_scheduler",
    # The first optimizer or DistributedDataParallel imports it: more than a second.
    "torch._dynamo",
    "lastwords.trainer.checkpointer",
    "lastwords.trainer.rank_main",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the launcher says: which rank this is and what it runs."""

    rank: int
    attempt: int
    environment: dict[str, str]
    folder: str
    kind: str
    target: str
    arguments: list[str]
    words: list[str]


def main() -> None:
    """Wait for a task, run it, leave."""
    parser = argparse.ArgumentParser(prog="python -m lastwords.trainer.runner")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--zygote", type=int, metavar="FD", help="load everything, then fork ranks when asked")
    start.add_argument("--standby", type=int, metavar="FD", help="load everything, then become a rank")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--gentle", action="store_true", help="import at the lowest priority")
    options = parser.parse_args()
    forking.die_with(options.parent)
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # ours: the current folder
    channel = socket.socket(fileno=options.standby if options.zygote is None else options.zygote)
    channel.set_inheritable(False)
    _prewarm(options.gentle, (lambda: _readable(channel)) if options.zygote is None else (lambda: False))
    if options.zygote is not None:
        channel = forking.serve(channel, options.parent)  # returns in forked processes only
    task = _receive(channel)
    _become(task)

    # Only now, since it needs torch: a rank that starts cold has told the launcher by now that it has its task.
    from lastwords.trainer import rank_main

    rank_main.run(task)


def _prewarm(gentle: bool, enough: Callable[[], bool]) -> None:
    """Import ahead of time, until it is `enough`: the task is there."""
    collects = gc.isenabled()
    gc.disable()  # looking for garbage takes a tenth of the imports' time and finds little
    if gentle:
        # A thread has a priority of its own. That of the main thread could not be raised again without privileges.
        thread = threading.Thread(target=_import_gently, args=(enough,))
        thread.start()
        thread.join()
    else:
        _import_all(enough)
    if collects:
        gc.enable()


def _import_gently(enough: Callable[[], bool]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    _import_all(enough)


def _import_all(enough: Callable[[], bool]) -> None:
    for module in _PREWARM:
        if enough():
            return
        try:
            __import__(module)
        except Exception as error:
            # Not fatal here: if the script needs it, it will say so itself.
            print(f"lastwords: cannot load {module} ahead of time: {error}", file=sys.stderr)


def _readable(channel: socket.socket) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def _receive(channel: socket.socket) -> Task:
    """Say that we are ready, and wait for the task; without one there is nothing to do here."""
    channel.sendall(b"ready\n")
    data = b""
    while not data.endswith(b"\n"):
        part = channel.recv(1 << 16)
        if not part:
            os._exit(0)
        data += part
    channel.sendall(b"taken\n")
    channel.close()
    fields: dict[str, Any] = json.loads(data)
    return Task(**fields)


def _become(task: Task) -> None:
    os.environ.clear()
    os.environ.update(task.environment)
    os.chdir(task.folder)
    for stream in (sys.stdout, sys.stderr):
        # As on a terminal: what a rank printed before it was killed has been seen.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


if __name__ == "__main__":
    main()
