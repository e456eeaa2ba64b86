"""
Plays the kubelet: keeps the two containers of each worker, an agent and a launcher process, running.

Each leads a session of its own, so that neither Ctrl-C nor the death of `lastwords run` reaches it. Containers that a
dead coordinator left running are adopted: they are found by their environment, so no file has to be right for it. A
container that ends is started again, at once the first time, later with a growing pause; it is counted. Output goes
to files, never to a pipe that would break with the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from lastwords.protocol import environment
from lastwords_operator.coordinator import ports
from lastwords_operator.core.observation import AGENT, TRAINER
from lastwords_operator.local import processes
from lastwords_operator.local.folder import JobFolder, replace_file

_log = logging.getLogger(__name__)

MODULES = {AGENT: "lastwords.agent", TRAINER: "lastwords.launcher"}
"""What each container runs."""
INCARNATION = "incarnation"
"""File in a worker's memory volume."""
LONG_LIFE_SECONDS = 10.0
"""A container that lived this long is started again without a pause."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the containers of a job are started."""

    job_uid: str
    name: str
    namespace: str
    workers: int
    procs: int
    command: tuple[str, ...]
    cwd: pathlib.Path
    storage: str
    coordinator_lost_seconds: float
    resume_from: str
    environment: Mapping[str, str]
    """Added to both; the launcher hands it on to the ranks."""
    memory_limit_bytes: int

    def arguments(self, folder: JobFolder, worker: int, kind: str, incarnation: str) -> list[str]:
        """Command line of a container."""
        volume = str(folder.volume(worker))
        if kind == TRAINER:
            line = [sys.executable, "-m", MODULES[kind], "--volume", volume, "--worker", str(worker)]
            line += ["--uid", worker_uid(self.job_uid, worker), "--logs", str(folder.logs), "--", *self.command]
            return line
        line = [sys.executable, "-m", MODULES[kind], "--volume", volume, "--worker", str(worker)]
        line += ["--incarnation", incarnation, "--coordinator", f"unix:{folder.socket}"]
        line += ["--storage", self.storage, "--job-uid", self.job_uid, "--job-name", self.name]
        line += ["--namespace", self.namespace, "--token-file", str(folder.token_file)]
        line += ["--workers", str(self.workers), "--procs", str(self.procs)]
        line += ["--coordinator-lost-seconds", str(self.coordinator_lost_seconds)]
        line += ["--resume-from", self.resume_from] if self.resume_from else []
        return line

    def variables(self, worker: int, kind: str) -> dict[str, str]:
        """Environment of a container."""
        values = dict(os.environ) | dict(self.environment)
        values[processes.CONTAINER_VARIABLE] = f"{self.job_uid}/{worker}/{kind}"
        values["PYTHONUNBUFFERED"] = "1"
        if kind == TRAINER:
            values.setdefault(environment.MEMORY_LIMIT_BYTES, str(self.memory_limit_bytes))
            values[environment.WORKERS] = str(self.workers)
            values[environment.PROCESSES_PER_WORKER] = str(self.procs)
        return values


def worker_uid(job_uid: str, worker: int) -> str:
    """What the launcher marks its ranks with."""
    return f"{job_uid}-w{worker}"


class Container:
    """One process that is to be there."""

    def __init__(self, worker: int, kind: str) -> None:
        self.worker, self.kind = worker, kind
        self.pid = 0
        self.pidfd = -1
        self.child: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        self.starts = 0
        self.short_lives = 0
        self.start_at = 0.0

    @property
    def running(self) -> bool:
        """Whether a process is known to be there."""
        return self.pidfd >= 0

    def took(self, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        """This process is the container now. Raises ProcessLookupError when it is gone already."""
        self.pidfd = os.pidfd_open(pid)
        self.pid, self.child, self.began = pid, child, time.monotonic()

    def ended(self) -> int | None:
        """Forget the process; its exit code, where we are the parent. Sets when it may start again."""
        lived = time.monotonic() - self.began
        os.close(self.pidfd)
        code = self.child.wait() if self.child is not None else None
        self.pidfd, self.pid, self.child = -1, 0, None
        self.short_lives = 0 if lived >= LONG_LIFE_SECONDS else self.short_lives + 1
        pause = 0.0 if self.short_lives < 2 else FIRST_PAUSE_SECONDS * 2 ** (self.short_lives - 2)
        self.start_at = time.monotonic() + min(pause, LONGEST_PAUSE_SECONDS)
        return code


class LocalWorkers:
    """`ports.Workers` over processes. `on_change` is called when a container started or ended."""

    def __init__(self, folder: JobFolder, recipe: Recipe, on_change: Callable[[], None]) -> None:
        self._folder = folder
        self._recipe = recipe
        self._on_change = on_change
        self._containers: dict[int, dict[str, Container]] = {}
        self._wanted: set[int] = set()
        self._replacing: set[int] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._poke = asyncio.Event()

    # --- port ---------------------------------------------------------------------------------------

    async def ensure(self, worker: int) -> None:
        """Keep the worker's containers running from now on."""
        if worker not in self._wanted and worker not in self._replacing:
            self._wanted.add(worker)
            self._kinds(worker)
            self._poke.set()

    async def replace(self, worker: int, incarnation: str) -> None:
        """End this incarnation and drop its memory; the containers that start next are another one."""
        if incarnation != self.incarnation(worker) or worker in self._replacing:
            return
        # A pass that runs meanwhile must not start anything in the memory that goes.
        self._replacing.add(worker)
        self._wanted.discard(worker)
        try:
            await asyncio.to_thread(processes.kill_all, self._recipe.job_uid, worker)
            await asyncio.to_thread(shutil.rmtree, self._folder.volume(worker), ignore_errors=True)
        finally:
            self._replacing.discard(worker)
        self._on_change()
        await self.ensure(worker)

    async def end(self, worker: int) -> None:
        """Do not start the worker's containers again. They end by their orders, or else in `finish`."""
        self._wanted.discard(worker)

    def containers(self) -> tuple[ports.Containers, ...]:
        """What there is now."""
        return tuple(
            ports.Containers(
                worker=worker,
                incarnation=self.incarnation(worker),
                pids={kind: container.pid for kind, container in kinds.items() if container.running},
                starts={kind: container.starts for kind, container in kinds.items()},
            )
            for worker, kinds in sorted(self._containers.items())
        )

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> list[str]:
        """Adopt what runs already (returns it, in words) and begin to keep containers running."""
        adopted = []
        for found in processes.find(self._recipe.job_uid):
            if found.kind not in MODULES or not found.is_container(MODULES[found.kind]):
                continue
            container = self._kinds(found.worker)[found.kind]
            if not container.running:
                with contextlib.suppress(ProcessLookupError):
                    self._take(container, found.pid, None)
                    adopted.append(f"{found.kind} of worker {found.worker} (process {found.pid})")
        self._keeper = asyncio.create_task(self._keep())
        return adopted

    async def finish(self, deadline_seconds: float) -> list[str]:
        """Wait until all containers have ended by themselves, then make sure that no process is left; says which."""
        self._wanted.clear()
        deadline = time.monotonic() + deadline_seconds
        while self._any_running() and time.monotonic() < deadline:
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), max(0.0, deadline - time.monotonic()))
        if self._keeper is not None:
            self._keeper.cancel()
        left = await asyncio.to_thread(processes.kill_all, self._recipe.job_uid)
        return [f"{found.kind} of worker {found.worker} (process {found.pid})" for found in left]

    def incarnation(self, worker: int) -> str:
        """Which life of the worker's memory this is; it is made with the volume and goes with it."""
        volume = self._folder.volume(worker)
        path = volume / INCARNATION
        if not path.exists():
            volume.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, secrets.token_hex(4).encode())
        return path.read_text().strip()

    def _kinds(self, worker: int) -> dict[str, Container]:
        return self._containers.setdefault(worker, {kind: Container(worker, kind) for kind in MODULES})

    def _any_running(self) -> bool:
        return any(container.running for kinds in self._containers.values() for container in kinds.values())

    async def _keep(self) -> None:
        while True:
            pause = self._start_missing()
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), pause)

    def _start_missing(self) -> float | None:
        """Start what is due; seconds until the next is, None when nothing waits."""
        waits = []
        for worker in sorted(self._wanted):
            for container in self._containers[worker].values():
                if container.running:
                    continue
                wait = container.start_at - time.monotonic()
                if wait > 0:
                    waits.append(wait)
                else:
                    self._start(container)
        return min(waits) if waits else None

    def _start(self, container: Container) -> None:
        worker, kind = container.worker, container.kind
        self._folder.volume(worker).mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = self._recipe.arguments(self._folder, worker, kind, self.incarnation(worker))
        with (self._folder.logs / f"{kind}-{worker}.log").open("ab") as log:
            child = subprocess.Popen(
                arguments,
                cwd=self._recipe.cwd,
                env=self._recipe.variables(worker, kind),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        container.starts += 1
        self._take(container, child.pid, child)

    def _take(self, container: Container, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        container.took(pid, child)
        asyncio.get_running_loop().add_reader(container.pidfd, self._ended, container)
        self._on_change()

    def _ended(self, container: Container) -> None:
        asyncio.get_running_loop().remove_reader(container.pidfd)
        pid = container.pid
        code = container.ended()
        if container.worker in self._wanted:
            _log.warning("%s of worker %d (process %d) ended with %s", container.kind, container.worker, pid, code)
        self._poke.set()
        self._on_change()
