"""
The session of a rank that no runner started: below a wrapped command (`bash run.sh`, `accelerate launch`, …).

The Checkpointer makes it. What the runner does around the script is done by hooks here: an exception, the end of the
interpreter, and SIGTERM (by which torchrun ends the survivors when one rank has died) wait until the agent has what it
needs of this process.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import os
import signal
import sys
import types
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lastwords.protocol import environment
from lastwords.protocol.control import Word
from lastwords.protocol.messages import ExitReport
from lastwords.trainer import rank_main
from lastwords.trainer.parts import StateError
from lastwords.trainer.session import Session

_TERMINATE_SECONDS = 25.0
"""torchrun sends SIGKILL 30 seconds after SIGTERM."""
_STORE_MINUTES = 30


def attach() -> Session | None:
    """
    Make this process the rank that its environment says it is; None when there is no wrapped command around it.

    Waits for rank 0, which hosts the attempt's store. Raises StateError when it is no rank of this job.
    """
    # Processes that this one starts are not the rank.
    if os.environ.pop(environment.WRAPPED, None) is None:
        return None
    rank = _own_rank()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank != 0 and not of_torchrun:
        host, _, port = address.rpartition(":")
        timeout = datetime.timedelta(minutes=_STORE_MINUTES)
        TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    session = Session.connect(
        volume=os.environ[environment.VOLUME],
        rank=rank,
        attempt=int(os.environ[environment.ATTEMPT]),
        store_host=rank == 0 and not of_torchrun,
        torch_store=address,
    )
    _Ending(session).install()
    return session


def _own_rank() -> int:
    """The rank, checked against what the job expects here. Raises StateError."""
    workers, processes = int(os.environ[environment.WORKERS]), int(os.environ[environment.PROCESSES_PER_WORKER])
    worker, world = int(os.environ[environment.WORKER]), workers * processes
    if "RANK" not in os.environ:
        raise StateError(
            f"this worker is to have {processes} ranks, but its command started the script without saying which rank "
            "it is (RANK is not set): use torchrun in the command, or one rank per worker (--procs 1)"
        )
    rank, told_world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    if told_world != world or rank // processes != worker:
        raise StateError(
            f"the command made rank {rank} of {told_world}, and this worker is to have ranks "
            f"{worker * processes} to {worker * processes + processes - 1} of {world}: leave out the options by which "
            "a torchrun in the command makes a job of its own (--standalone, --nnodes, --nproc-per-node, --node-rank, "
            "--rdzv-…), Lastwords sets them"
        )
    return rank


class _Ending:
    """Tells the agent how the script ended, once, and only in the process that is the rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._told = False
        self._show = sys.excepthook
        self._exit = sys.exit
        self._code: Any = None

    def install(self) -> None:
        """Set the hooks."""
        sys.excepthook = self._raised
        # The interpreter tells its exit code to nobody, and a SystemExit to no hook.
        sys.exit = self._note_code
        atexit.register(self._ended)
        try:
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminated)
        except ValueError:
            pass  # not on the main thread: SIGTERM ends the process at once, as it always did

    def _note_code(self, status: Any = None, /) -> NoReturn:
        self._code = status
        self._exit(status)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self._show(kind, error, trace)
        self._tell(error)

    def _ended(self) -> None:
        self._tell(None if self._code is None else SystemExit(self._code))

    def _tell(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid or self._told:
            return
        self._told = True
        report, _ = rank_main.describe(None if self._session.get(Word.DONE) else error)
        if report is not None and (step := self._session.get(Word.STEP)):
            report = dataclasses.replace(report, step=step - 1)
        # `error` is alive until here, and with it everything its frames hold: the state that may have to be copied.
        self._session.script_ended(report)

    def _terminated(self, number: int, frame: types.FrameType | None) -> None:
        """Whoever ends us has to wait for the state; a main thread inside of a collective does not even get here."""
        if os.getpid() == self._pid:
            if not self._told:
                self._told = True
                asked = ExitReport(signal=number, message="asked to end (SIGTERM)", secondary=True)
                self._session.script_ended(asked, _TERMINATE_SECONDS)
            else:
                self._session.wait_may_exit(_TERMINATE_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
