"""`lastwords run`: start a job, go on with it, or watch it."""

from __future__ import annotations

import asyncio
import json
import pathlib
import uuid
from collections.abc import Sequence
from typing import Any

from lastwords.storage import places
from lastwords.storage.base import StorageError
from lastwords_operator.core import decide
from lastwords_operator.core.model import JobState, JobStatus
from lastwords_operator.local import attach, inject, outcome, processes
from lastwords_operator.local.asked import Asked
from lastwords_operator.local.folder import FolderError, JobFolder, memory_room, read_json, replace_file
from lastwords_operator.local.session import Session
from lastwords_operator.local.store import FileStatusStore, read_status
from lastwords_operator.local.workers import Recipe
from lastwords_operator.view.show import display

LEAST_MEMORY_BYTES = 8 * 1024 * 1024
"""Per rank: control block, records, and the smallest models."""
MEMORY_SHARE = 0.9
"""Part of the free memory that the volumes may take."""


def run(
    wanted: Asked,
    *,
    memory: pathlib.Path | None,
    faults: Sequence[inject.Fault],
    coordinator_lost_seconds: float,
    plain: bool,
) -> int:
    """The job's exit code. Raises FolderError when the folder is another job's, or cannot be used."""
    folder = JobFolder(wanted.folder, memory)
    _make(folder.path)
    while not folder.lock():
        _compare(folder, wanted)
        print(f"{folder.path}: process {folder.locked_by()} is running this job; showing it", flush=True)
        code = attach.watch(folder, wanted.spec.workers, display(plain=plain))
        if code is not None:
            return code
    try:
        uid = _claim(folder, wanted, memory)
        status, _ = read_status(folder)
        if status is not None and status.state is JobState.COMPLETE:
            # Whoever completed it may have died before it had cleaned up.
            processes.kill_all(uid)
            folder.remove_volumes()
            folder.remove_runtime()
            print(f"{folder.path}: the job is complete already, at step {status.progress_step}; use another --dir")
            return outcome.COMPLETE
        _check_storage(wanted.storage)
        folder.prepare()
        recipe = _recipe(folder, wanted, uid, coordinator_lost_seconds)
        if status is not None:
            asyncio.run(_start_again(folder, status))
        outcome.forget(folder)
        return asyncio.run(Session(folder, wanted.spec, recipe, faults, display(plain=plain)).run())
    finally:
        folder.unlock()


def _make(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"cannot make the job folder {path}: {error.strerror}; choose another --dir") from None


def _claim(folder: JobFolder, wanted: Asked, memory: pathlib.Path | None) -> str:
    """Write down what was asked for, or check that it is the same as before; the job's uid."""
    recorded = _compare(folder, wanted)
    if recorded is None:
        uid = uuid.uuid4().hex
        text = json.dumps({"uid": uid, "asked": wanted.record()}, indent=2) + "\n"
        replace_file(folder.job_file, text.encode())
        return uid
    if memory is not None and not folder.memory.is_relative_to(memory.resolve()):
        raise FolderError(f"the job's memory is in {folder.memory}, not in {memory}; leave --memory-dir out")
    return str(recorded["uid"])


def _compare(folder: JobFolder, wanted: Asked) -> dict[str, Any] | None:
    """What was recorded, None when nothing was. FolderError when it differs, with what differs."""
    recorded = read_json(folder.job_file)
    if recorded is None:
        return None
    if not isinstance(recorded, dict) or not isinstance(recorded.get("asked"), dict):
        raise FolderError(f"{folder.job_file} is not a job of this version; use another --dir")
    different = [f"{path} was {old}, is {new}" for path, old, new in _differences(recorded["asked"], wanted.record())]
    if different:
        raise FolderError(
            f"{folder.path} holds another job: {'; '.join(different)}. Run the same command to go on with it, "
            "or give --dir another folder"
        )
    return recorded


def _differences(old: Any, new: Any, path: str = "") -> list[tuple[str, str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        rows = []
        for key in sorted(old.keys() | new.keys()):
            rows += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return rows
    return [] if old == new else [(path, json.dumps(old), json.dumps(new))]


def _check_storage(storage: str) -> None:
    """A job that could never save anything is refused now rather than found out at its first fault."""
    probe = f".lastwords-probe-{uuid.uuid4().hex}"
    try:
        store = places.open_store(storage)
        store.write(probe, [b"x"], 1)
        store.remove(probe)
    except StorageError as error:
        raise FolderError(f"cannot write to the storage: {error}; name another --storage") from None


def _recipe(folder: JobFolder, wanted: Asked, uid: str, coordinator_lost_seconds: float) -> Recipe:
    spec = wanted.spec
    free, taken = memory_room(folder)
    limit = int(MEMORY_SHARE * (free + taken)) // spec.workers
    needed = LEAST_MEMORY_BYTES * spec.processes_per_worker
    if limit < needed:
        raise FolderError(
            f"{folder.memory} is in a file system with {free / 1e6:.0f} MB free: that is {limit / 1e6:.0f} MB for each "
            f"of {spec.workers} workers, and the smallest needs {needed / 1e6:.0f} MB. Free some, make it larger, or "
            "name another tmpfs with --memory-dir"
        )
    return Recipe(
        job_uid=uid,
        name=spec.name,
        namespace=wanted.namespace,
        workers=spec.workers,
        procs=spec.processes_per_worker,
        command=wanted.command,
        cwd=wanted.cwd,
        storage=wanted.storage,
        coordinator_lost_seconds=coordinator_lost_seconds,
        resume_from=wanted.resume_from,
        environment=wanted.environment,
        memory_limit_bytes=limit,
    )


async def _start_again(folder: JobFolder, status: JobStatus) -> None:
    """A job that failed or was stopped goes on when it is run again."""
    again = decide.resumed(status)
    if again != status:
        store = FileStatusStore(folder)
        _, version = await store.load()
        await store.save(again, version)
