"""A rank's life once it knows which one it is: session, the user's script, its ending."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import io
import os
import signal
import sys
import threading
import traceback
import types
from typing import TYPE_CHECKING, NoReturn

from lastwords.protocol import environment
from lastwords.protocol.control import Word
from lastwords.protocol.messages import ExitReport
from lastwords.trainer import errors, main_module
from lastwords.trainer.session import Session

if TYPE_CHECKING:
    from lastwords.trainer.runner import Task

_MESSAGE_CHARS = 4000
_TRACEBACK_CHARS = 16000


def run(task: Task) -> NoReturn:
    """Run the task's script in a session with the agent and end the process as plain python would have."""
    own_pid = os.getpid()
    folder = os.environ[environment.VOLUME]
    session = Session.connect(volume=folder, rank=task.rank, attempt=task.attempt, store_host=task.rank == 0)
    welcome = session.wait_welcome()
    host, _, port = welcome.store_address.rpartition(":")
    # Rank 0 hosts the attempt's store already: torch is not to start another one on that port.
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    error = _execute(task)
    if os.getpid() != own_pid:
        # A process that the script forked came out of it: it is not this rank's ending.
        if error is not None:
            raise error
        sys.exit(0)
    report, code = describe(error)
    if error is not None:
        _show(error)
    if report is None:
        threading._shutdown()  # type: ignore[attr-defined]  # threads of the script are still the script
    elif step := session.get(Word.STEP):
        report = dataclasses.replace(report, step=step - 1)
    session.script_ended(report)
    # `error` is alive until here, and with it everything its frames hold: the state that may have to be copied.
    _leave(code, interrupted=isinstance(error, KeyboardInterrupt))


def describe(error: BaseException | None) -> tuple[ExitReport | None, int]:
    """What the agent is told of an ending (None: a normal one) and the exit code, as python would choose it."""
    if error is None:
        return None, 0
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None, 0
        code, message = (error.code & 0xFF, "") if isinstance(error.code, int) else (1, str(error.code))
        return ExitReport(code=code, message=message[:_MESSAGE_CHARS], secondary=errors.is_secondary(error)), code
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    report = ExitReport(
        code=code,
        exception=errors.name(error),
        message=str(error)[:_MESSAGE_CHARS],
        traceback=text[-_TRACEBACK_CHARS:],
        secondary=errors.is_secondary(error),
    )
    return report, code


def _execute(task: Task) -> BaseException | None:
    try:
        main_module.run(task.kind, task.target, task.arguments, task.words)
    except BaseException as error:
        return error.with_traceback(_users_part(error.__traceback__))
    return None


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames that ran the script."""
    ours = main_module.own_frames() | {__file__}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _show(error: BaseException) -> None:
    """Print it where python would have."""
    try:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    _flush_standard()


def _leave(code: int, interrupted: bool) -> NoReturn:
    """
    End the process without unloading torch.

    Its destructors wait for peers that may be dead, or abort with a message. What python promises at an end is done
    here: exit functions run, open files are written out.
    """
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _flush_files()
    _flush_standard()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _flush_files() -> None:
    """Write out files that the script left open, as their destructors would have."""
    files: list[io.IOBase] = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]
    # From the outside in: text, then compressed files (which have an end to write), then buffers.
    for kinds, finish in (
        (io.TextIOBase, "flush"),
        (io.BufferedIOBase, "close"),
        ((io.BufferedWriter, io.BufferedRandom), "flush"),
    ):
        for item in files:
            try:
                plain = finish == "close" and type(item).__module__ in ("_io", "io")
                if isinstance(item, kinds) and not plain and not item.closed:
                    getattr(item, finish)()
            except Exception:
                pass  # a file that cannot be written at the end of its process has nobody left to tell


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
