"""Keeping containers running: real processes that play agent and launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from lastwords_operator.core.observation import AGENT, TRAINER
from lastwords_operator.local import processes, workers
from lastwords_operator.local.folder import JobFolder

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class SleepRecipe(workers.Recipe):
    """Starts processes that only sleep, under the names of the real ones."""

    def arguments(self, folder: JobFolder, worker: int, kind: str, incarnation: str) -> list[str]:
        return [sys.executable, "-c", self.command[0], workers.MODULES[kind], str(worker), incarnation]


@pytest.fixture
def memory() -> Iterator[pathlib.Path]:
    """A short path: sockets are made below it."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="lw-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(tmp_path: pathlib.Path, memory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory / "run"))
    job = JobFolder(tmp_path / "job", memory)
    job.prepare()
    return job


@pytest.fixture
def uid() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    assert processes.kill_all(name) == []


def recipe(folder: JobFolder, uid: str, code: str = SLEEP) -> workers.Recipe:
    return SleepRecipe(
        job_uid=uid,
        name="job",
        namespace="default",
        workers=2,
        procs=2,
        command=(code,),
        cwd=folder.path,
        storage=str(folder.path),
        resume_from="",
        coordinator_lost_seconds=60.0,
        environment={"FROM_THE_JOB": "yes"},
        memory_limit_bytes=10**9,
    )


@contextlib.asynccontextmanager
async def keeping(folder: JobFolder, uid: str, code: str = SLEEP) -> AsyncIterator[workers.LocalWorkers]:
    local = workers.LocalWorkers(folder, recipe(folder, uid, code), lambda: None)
    local.start()
    try:
        yield local
    finally:
        await local.finish(0.0)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come about"
        await asyncio.sleep(0.01)


def pids(local: workers.LocalWorkers, worker: int = 0) -> dict[str, int]:
    return next((row.pids for row in local.containers() if row.worker == worker), {})


async def test_both_containers_run_each_in_a_session_of_its_own(folder: JobFolder, uid: str) -> None:
    async with keeping(folder, uid) as local:
        await local.ensure(0)
        await until(lambda: len(pids(local)) == 2)
        assert set(pids(local)) == {AGENT, TRAINER}
        assert {os.getsid(pid) for pid in pids(local).values()} == set(pids(local).values())
    assert processes.find(uid) == []


async def test_a_killed_container_is_started_again_and_the_other_one_is_left_alone(folder: JobFolder, uid: str) -> None:
    async with keeping(folder, uid) as local:
        await local.ensure(0)
        await until(lambda: len(pids(local)) == 2)
        before = pids(local)
        os.kill(before[AGENT], signal.SIGKILL)
        await until(lambda: pids(local).get(AGENT, before[AGENT]) != before[AGENT])
        assert pids(local)[TRAINER] == before[TRAINER]
        (row,) = local.containers()
        assert row.starts == {AGENT: 2, TRAINER: 1}


async def test_one_that_ends_at_once_again_and_again_is_started_with_growing_pauses(
    folder: JobFolder, uid: str
) -> None:
    async with keeping(folder, uid, "raise SystemExit(3)") as local:
        await local.ensure(0)
        await until(lambda: all(row.starts[AGENT] == 3 for row in local.containers()))
        container = local._containers[0][AGENT]
        await until(lambda: not container.running)
        assert container.short_lives == 3
        pause = container.start_at - container.began
        assert pause >= 2 * workers.FIRST_PAUSE_SECONDS


async def test_what_a_dead_coordinator_left_running_is_adopted(folder: JobFolder, uid: str) -> None:
    code = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import pathlib
import test_local_workers as t
from lastwords_operator.local import workers
from lastwords_operator.local.folder import JobFolder
async def main():
    folder = JobFolder(pathlib.Path({str(folder.path)!r}))
    local = workers.LocalWorkers(folder, t.recipe(folder, {uid!r}), lambda: None)
    local.start()
    await local.ensure(0)
    await local.ensure(1)
    await t.until(lambda: len(t.pids(local)) == 2 and len(t.pids(local, 1)) == 2)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    first = subprocess.run([sys.executable, "-c", code], check=False)
    assert first.returncode == -signal.SIGKILL
    left = {found.pid for found in processes.find(uid)}
    assert len(left) == 4
    local = workers.LocalWorkers(folder, recipe(folder, uid), lambda: None)
    assert len(local.start()) == 4
    try:
        await local.ensure(0)
        await local.ensure(1)
        assert {*pids(local).values(), *pids(local, 1).values()} == left
        os.kill(pids(local)[TRAINER], signal.SIGKILL)  # not our child, and noticed all the same
        await until(lambda: pids(local).get(TRAINER, next(iter(left))) not in left)
    finally:
        assert await local.finish(0.0) == []


async def test_an_ended_worker_is_not_started_again(folder: JobFolder, uid: str) -> None:
    async with keeping(folder, uid) as local:
        await local.ensure(0)
        await until(lambda: len(pids(local)) == 2)
        await local.end(0)
        for pid in pids(local).values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not pids(local))
        await local.ensure(1)
        await until(lambda: len(pids(local, 1)) == 2)
        assert not pids(local)


async def test_finish_waits_for_a_good_end_and_then_leaves_nothing_behind(folder: JobFolder, uid: str) -> None:
    spawning = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
    async with keeping(folder, uid, spawning + SLEEP) as local:
        await local.ensure(0)
        await until(lambda: len(processes.find(uid)) == 4)
        assert await local.finish(0.1) == []
    assert processes.find(uid) == []


async def test_a_replaced_worker_has_lost_its_memory_and_is_another_incarnation(folder: JobFolder, uid: str) -> None:
    async with keeping(folder, uid) as local:
        await local.ensure(0)
        await until(lambda: len(pids(local)) == 2)
        old, before = local.incarnation(0), pids(local)
        (folder.volume(0) / "control-00000").write_bytes(b"x")
        await local.replace(0, "somebody else")
        assert local.incarnation(0) == old
        await local.replace(0, old)
        await until(lambda: len(pids(local)) == 2 and not set(pids(local).values()) & set(before.values()))
        assert local.incarnation(0) != old
        assert [path.name for path in folder.volume(0).iterdir()] == [workers.INCARNATION]


def test_the_containers_environment_marks_it_and_limits_its_memory(folder: JobFolder, uid: str) -> None:
    plan = recipe(folder, uid)
    variables = plan.variables(1, TRAINER)
    assert variables[processes.CONTAINER_VARIABLE] == f"{uid}/1/{TRAINER}"
    assert variables["LASTWORDS_MEMORY_LIMIT_BYTES"] == "1000000000"
    assert variables["FROM_THE_JOB"] == "yes"
    assert "LASTWORDS_MEMORY_LIMIT_BYTES" not in plan.variables(1, AGENT)
