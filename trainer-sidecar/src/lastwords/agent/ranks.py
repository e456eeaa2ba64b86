"""One rank of the attempt in force, as its agent knows it: process, connection, control block."""

from __future__ import annotations

import dataclasses
import math
import struct
import time

from lastwords.agent.local import Connection
from lastwords.agent.volume import Block
from lastwords.protocol import wire
from lastwords.protocol.control import Word
from lastwords.protocol.messages import ExitReport, RankReport, RankState, StackReport

LAUNCHER_GONE = ExitReport(signal=9, message="the launcher ended, and its ranks with it")

_SNAPSHOTS_KEPT = 4


class Rank:
    """What is known of `rank` in `attempt`; a new attempt gets new objects."""

    def __init__(self, rank: int, attempt: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.connection: Connection | None = None
        self.connected_once = False
        self.process: wire.RankProcess | None = None
        self.launcher_gone = False
        """The launcher that started it is gone."""
        self.ended: wire.ScriptEnded | None = None
        self.finished: wire.Finished | None = None
        self.snapshots: dict[int, wire.SnapshotReady] = {}
        """Those that are to be persisted, by step: the last few."""
        self.connections = 0
        self.pid = 0
        """As it said itself when it connected; 0 before."""
        self.hold_state: wire.HoldState | None = None
        self.hold_sent: wire.Hold | None = None
        self.welcomed = False
        self.plan_sent = -1
        self.may_exit_sent = False
        self.stack: StackReport | None = None
        self.early_kept = -1
        """Newest step whose early record the neighbour has."""

    @property
    def deserted(self) -> bool:
        """Whether it lives on after the end of the wrapped command that started it, and with it of torchrun's store."""
        process = self.process
        return process is not None and process.alive and process.command_alive is False and not self.through

    @property
    def alive(self) -> bool:
        """Whether there is a process, as far as is known."""
        if self.process is not None and not self.process.alive:
            # Its connection may be open still: forked children have inherited it.
            return False
        if self.connection is not None:
            return True
        return self.process is not None and not self.launcher_gone

    @property
    def through(self) -> bool:
        """Whether it has nothing left to do: its end is none that others must be held for."""
        return self.finished is not None or (self.ended is not None and self.ended.exit is None)

    def broken(self) -> str:
        """Why the worker must hold because of this rank; "" = nothing is wrong with it."""
        if self.ended is not None and self.ended.exit is not None:
            return "its script ended with an exception"
        if self.through:
            return ""
        if self.deserted:
            return "the command that started it ended"
        if self.process is not None and not self.process.alive:
            return "" if self.process.code == 0 else "its process died"
        if self.connected_once and self.connection is None:
            return "its connection ended"
        return "its launcher ended" if self.launcher_gone else ""

    def connect(self, connection: Connection) -> None:
        """A new connection of this rank: what was sent on the last one is sent again."""
        self.connection = connection
        self.connected_once = True
        self.connections += 1
        self.hold_sent = self.hold_state = None
        self.welcomed = self.may_exit_sent = False
        self.plan_sent = -1

    def disconnect(self) -> None:
        """The connection is over."""
        self.connection = None
        self.hold_state = None

    def add_snapshot(self, ready: wire.SnapshotReady) -> None:
        """Note a snapshot that is to be persisted."""
        if ready.persist:
            self.snapshots[ready.step] = ready
            for step in sorted(self.snapshots)[:-_SNAPSHOTS_KEPT]:
                del self.snapshots[step]

    def send(self, message: object) -> None:
        """Send when there is a connection."""
        if self.connection is not None:
            self.connection.send(message)

    def exit_report(self) -> ExitReport | None:
        """How it ended or is about to."""
        told = self.ended.exit if self.ended is not None else None
        process = self.process
        if process is not None and (not process.alive or (self.deserted and told is None)):
            base = told or ExitReport(traceback=process.log_tail)
            return dataclasses.replace(base, code=process.code, signal=process.signal)
        if told is None and not self.alive and self.launcher_gone and not self.through:
            return LAUNCHER_GONE
        return told

    def state(self, block: Block | None) -> RankState:
        """Where it is. `block` None: no control block of this attempt."""
        exit_ = self.exit_report()
        through = self.through or (block is not None and block[Word.DONE] == 1)
        if not self.alive and (self.process is not None or self.connected_once or self.launcher_gone):
            clean = exit_ is None or (not exit_.code and exit_.signal is None and exit_.exception is None)
            return RankState.FINISHED if through and clean else RankState.EXITED
        if not self.alive:
            return RankState.ABSENT
        if exit_ is not None:
            return RankState.ERRORED
        if through:
            return RankState.FINISHED
        return RankState.RUNNING if block is not None and block[Word.STEP] else RankState.STARTING

    def _in_tail(self) -> bool:
        """Whether its script, or the command around it, goes on after its last step."""
        if self.process is not None and self.process.command_alive:
            return True
        return self.alive and self.ended is None

    def report(self, block: Block | None, hold: int) -> RankReport:
        """For the coordinator. `hold`: number of the hold in force, 0 = none."""
        if block is not None and block[Word.ATTEMPT] != self.attempt:
            block = None
        state = self.state(block)
        acknowledged = self.hold_state is not None and hold > 0 and self.hold_state.hold >= hold
        base = RankReport(
            rank=self.rank,
            state=state,
            pid=self.process.pid if self.process is not None else 0,
            in_tail=state is RankState.FINISHED and self._in_tail(),
            held=acknowledged and self.alive,
            exit=self.exit_report(),
            stack=self.stack,
        )
        return base if block is None else _with_block(base, block)


def _with_block(report: RankReport, block: Block) -> RankReport:
    now = time.monotonic_ns()
    step = block[Word.STEP] - 1
    phase = block.phase
    return dataclasses.replace(
        report,
        pid=report.pid or block[Word.PID],
        step=step if step >= 0 else None,
        odd=bool(block[Word.UPDATE_COUNTER] & 1),
        at_gate=bool(block[Word.AT_GATE]),
        phase=phase.name if phase is not None else None,
        phase_timeout_seconds=phase.timeout_seconds if phase is not None else None,
        quiet_seconds=_age(now, block[Word.BOUNDARY_NS]) or 0.0,
        step_seconds=block[Word.STEP_NS] / 1e9 or None,
        plan_number=block[Word.PLAN_NUMBER],
        loss=_double(block[Word.LOSS_BITS]),
        first_step_age_seconds=_age(now, block[Word.FIRST_STEP_NS]),
        restored_age_seconds=_age(now, block[Word.RESTORED_NS]),
        stall_seconds_last=block[Word.LAST_STALL_NS] / 1e9,
        copy_seconds_last=block[Word.LAST_COPY_NS] / 1e9,
        snapshots=block[Word.SNAPSHOTS],
        snapshots_skipped=block[Word.SNAPSHOTS_SKIPPED],
    )


def _age(now: int, then: int) -> float | None:
    return max(0, now - then) / 1e9 if then else None


def _double(bits: int) -> float | None:
    if not bits:
        return None
    value = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value if math.isfinite(value) else None


def process_state(pid: int) -> str:
    """Letter of /proc/<pid>/stat; "" when it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return ""
