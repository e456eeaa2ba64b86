"""One storm: a run under `lastwords run`, and kills aimed at delicate moments."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import psutil

from lastwords.protocol import control
from lastwords_operator.local import processes
from tests.storm.windows import WindowsLog

REFERENCE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "train_reference.py"
RANK_WINDOWS = ("update", "snapshot_copy", "live_copy", "restore")
AGENT_WINDOWS = ("persist", "commit_gap", "prepare")
RECOVERY_STATES = ("LastWords", "Recovering", "Gathering", "Starting")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is stormed. `script` are the arguments of the reference script."""

    folder: pathlib.Path
    memory: pathlib.Path
    seed: int
    script: tuple[str, ...]
    save_every: str = "5steps"
    workers: int = 2
    procs: int = 2
    replicas: int = 0
    lose_workers: bool = False
    """Now and then a whole worker goes, its memory with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: whom, when, in which windows the process was (as far as its own log says)."""

    number: int
    at: float
    target: str
    pid: int
    aimed_at: str
    windows: tuple[str, ...]
    state: str
    steps: dict[int, int]


class Storm:
    """Starts the run, kills, and keeps what is needed for the proof."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.log = WindowsLog(settings.folder / "windows.log")
        self.kills: list[Kill] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def job(self) -> pathlib.Path:
        """The job folder."""
        return self.settings.folder / "job"

    def start(self) -> None:
        """Start `lastwords run`, or start it again after it was killed."""
        command = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain"]
        command += [f"--workers={self.settings.workers}", f"--procs={self.settings.procs}", "--max-restarts=100000"]
        command += [f"--dir={self.job}", f"--memory-dir={self.settings.memory}"]
        command += [f"--save-every={self.settings.save_every}", f"--replicas={self.settings.replicas}"]
        command += ["--", sys.executable, str(REFERENCE)]
        environment = os.environ | {
            "LASTWORDS_WINDOWS_LOG": str(self.log.path),
            "LASTWORDS_JOURNAL": str(self.settings.folder / "journal.jsonl"),
            "OMP_NUM_THREADS": "1",
        }
        with (self.settings.folder / "output.log").open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *self.settings.script],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def status(self) -> dict[str, Any]:
        """The job's status as the coordinator wrote it; empty before the first one."""
        try:
            data = json.loads((self.job / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return data.get("status", data) if isinstance(data, dict) else {}

    def epoch(self) -> str:
        """Number of the coordinator that acts; a new one has taken over only when it has changed."""
        try:
            return (self.job / "epoch").read_text()
        except OSError:
            return ""

    def steps(self, word: control.Word = control.Word.STEP) -> dict[int, int]:
        """Boundaries passed by each rank (or the floor it knows), read from the control blocks themselves."""
        found = {}
        for path in self.settings.memory.glob("**/control-*"):
            block = memoryview(path.read_bytes())
            if control.is_valid(block):
                found[control.get(block, control.Word.RANK)] = control.get(block, word) - 1
        return found

    def wait_for_first_snapshot(self, deadline_seconds: float = 120) -> None:
        """
        Until some step is whole on all ranks.

        Before that a rank's random numbers can be lost with it: the job then goes on reseeded, and says so.
        """
        deadline = time.monotonic() + deadline_seconds
        world = self.settings.workers * self.settings.procs
        while time.monotonic() < deadline:
            floors = self.steps(control.Word.FLOOR_STEP)
            if len(floors) == world and min(floors.values()) > 0:
                return
            time.sleep(0.02)
        raise AssertionError(f"no snapshot within {deadline_seconds} s")

    def rank_pids(self) -> dict[int, int]:
        """Process of each rank of the newest attempt."""
        found = {}
        for path in self.settings.memory.glob("**/control-*"):
            block = memoryview(path.read_bytes())
            if control.is_valid(block):
                pid = control.get(block, control.Word.PID)
                if psutil.pid_exists(pid):
                    found[control.get(block, control.Word.RANK)] = pid
        return found

    def container_pids(self, module: str) -> list[int]:
        """Processes of `python -m <module>` that belong to this run."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            line = process.info["cmdline"] or []
            if module in line and any(str(self.settings.memory) in argument for argument in line):
                found.append(process.info["pid"])
        return sorted(found)

    def left_over(self) -> list[str]:
        """Processes of this run that still live: command lines."""
        return [
            " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["pid", "cmdline"])
            if any(str(self.settings.memory) in argument for argument in process.info["cmdline"] or [])
        ]

    def wait_for_progress(self, deadline_seconds: float = 120) -> None:
        """Until all ranks run and have made a new step; raises with the end of the output otherwise."""
        first: dict[int, int] | None = None
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            self.log.read()
            assert self.process is not None
            if self.process.poll() is not None:
                return
            if self.status().get("state") == "Running":
                steps = self.steps()
                if first is None:
                    first = steps
                elif len(steps) == self.settings.workers * self.settings.procs and all(
                    step > first.get(rank, -1) for rank, step in steps.items()
                ):
                    return
            else:
                first = None
            time.sleep(0.02)
        tail = (self.settings.folder / "output.log").read_text()[-6000:]
        raise AssertionError(f"no progress within {deadline_seconds} s; state {self.status().get('state')}\n{tail}")

    def kill(self, pid: int, target: str, aimed_at: str) -> None:
        """SIGKILL, and note which windows the process died in."""
        state, steps = str(self.status().get("state")), self.steps()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + 5
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            if self.process is not None and pid == self.process.pid:
                self.process.wait()
                break
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    break
            except psutil.NoSuchProcess:
                break
            time.sleep(0.001)
        self.log.read()
        self._note(target, pid, aimed_at, self.log.forget(pid), state, steps)
        if target == "coordinator":
            before = self.epoch()
            self.start()
            while self.epoch() == before and self.process is not None and self.process.poll() is None:
                time.sleep(0.02)

    def _note(
        self, target: str, pid: int, aimed_at: str, windows: Iterable[str], state: str, steps: dict[int, int]
    ) -> None:
        kill = Kill(
            number=len(self.kills) + 1,
            at=time.time(),
            target=target,
            pid=pid,
            aimed_at=aimed_at,
            windows=tuple(sorted(windows)),
            state=state,
            steps=steps,
        )
        self.kills.append(kill)
        with (self.settings.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(kill)) + "\n")
        print(
            f"kill {kill.number}: {target} (aimed at {aimed_at}) in {', '.join(kill.windows) or 'no window'}, "
            f"state {state}, steps {sorted(steps.values())}",
            flush=True,
        )

    def counts(self) -> dict[str, int]:
        """How many kills hit each window so far; states of the coordinator count as windows too."""
        found: dict[str, int] = {}
        for kill in self.kills:
            names = set(kill.windows)
            if kill.state in RECOVERY_STATES:
                names.add("second kill during recovery")
            if kill.state == "Gathering":
                names.add("gathering")
            for name in names:
                found[name] = found.get(name, 0) + 1
        return found

    # --- aimed kills --------------------------------------------------------------------------------

    def kill_in_window(self, window: str, deadline_seconds: float = 30) -> None:
        """Wait until some process enters the window, then kill it a random moment later."""
        if window in ("live_copy", "restore", "prepare"):
            self.kill_rank("to bring about " + window)
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            for mark in self.log.read():
                if mark.begins and mark.window == window and psutil.pid_exists(mark.pid):
                    time.sleep(self.random.random() * min(0.5, self.log.typical_seconds(window)))
                    target = f"rank {mark.who}" if mark.who != "agent" else "agent"
                    self.kill(mark.pid, target, window)
                    return
            if self.process is not None and self.process.poll() is not None:
                return
            time.sleep(0.001)

    def kill_in_state(self, state: str, deadline_seconds: float = 30) -> None:
        """Kill a rank; when the job reaches `state`, kill something else."""
        self.kill_rank(f"to bring about {state}")
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            self.log.read()
            if self.status().get("state") == state:
                self.kill_anything(state)
                return
            time.sleep(0.001)

    def kill_rank(self, aimed_at: str = "any moment") -> None:
        """Kill a random rank now."""
        ranks = self.rank_pids()
        if ranks:
            rank = self.random.choice(sorted(ranks))
            self.kill(ranks[rank], f"rank {rank}", aimed_at)

    def lose_worker(self, aimed_at: str) -> None:
        """All processes of a random worker and its memory at once, as when a node dies."""
        assert self.process is not None
        worker = self.random.randrange(self.settings.workers)
        uid = json.loads((self.job / "job.json").read_text())["uid"]
        state, steps = str(self.status().get("state")), self.steps()
        # The coordinator plays the kubelet too: it must not start anything in the memory that goes.
        self.process.send_signal(signal.SIGSTOP)
        try:
            found = processes.find(uid)
            launchers = [row.pid for row in found if row.worker == worker and row.is_container("lastwords.launcher")]
            assert not processes.kill_all(uid, worker)
            for folder in self.settings.memory.glob(f"*/worker-{worker}"):
                shutil.rmtree(folder)
        finally:
            self.process.send_signal(signal.SIGCONT)
        windows = set().union(*(self.log.forget(row.pid) for row in found if row.worker == worker))
        self._note(f"worker {worker}", next(iter(launchers), 0), aimed_at, windows, state, steps)

    def kill_anything(self, aimed_at: str = "any moment") -> None:
        """Kill a random rank, launcher, agent or the coordinator, or lose a worker."""
        targets = ["rank", "launcher", "agent", "coordinator"]
        target = self.random.choice([*targets, "worker"] if self.settings.lose_workers else targets)
        if target == "rank":
            self.kill_rank(aimed_at)
        elif target == "worker":
            self.lose_worker(aimed_at)
        elif target == "coordinator":
            assert self.process is not None
            self.kill(self.process.pid, "coordinator", aimed_at)
        else:
            pids = self.container_pids(f"lastwords.{target}")
            if pids:
                self.kill(self.random.choice(pids), target, aimed_at)
