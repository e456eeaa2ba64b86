"""`lastwords checkpoints`: look at what is in storage; no job has to run."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lastwords.protocol.manifest import CLAIM, CheckpointId, Manifest, parse_folder
from lastwords.protocol.messages import CheckpointInfo
from lastwords.storage import adopting, places
from lastwords.storage.base import StorageError, Store
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints

DAMAGED = 1
"""Exit code when a checkpoint does not verify."""


class CheckpointsError(Exception):
    """Not a storage, or nothing in it; the text says what was looked for."""


def list_command(place: str) -> int:
    """One line for each committed checkpoint, oldest first; those that cannot be used with the reason."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "step", "attempt", "kind", "size", "", "folder"):
        table.add_column(name, justify="right" if name in ("step", "attempt", "size") else "left")
    for job in _jobs(place):
        for info in _listed(job):
            row = [f"{job.namespace}/{job.name}", str(info.id.step), str(info.id.attempt), info.kind]
            table.add_row(*row, size(info.nbytes), _state(info), escape(info.id.folder))
    _console().print(table if table.row_count else "no committed checkpoint")
    return 0


def verify_command(place: str) -> int:
    """Read every byte; 1 when anything is wrong with any checkpoint."""
    console = _console()
    damaged = False
    for job, checkpoint in _chosen(place):
        try:
            problems = job.verify(checkpoint)
        except StorageError as error:
            problems = [str(error)]
        damaged |= bool(problems)
        console.print(f"{checkpoint.folder}: {'whole' if not problems else 'DAMAGED'}", markup=False)
        for problem in problems:
            console.print(f"  {problem}", markup=False)
    return DAMAGED if damaged else 0


def show_command(place: str) -> int:
    """What is in the newest checkpoint, or in the one named: who wrote what, and every tensor."""
    chosen = list(_chosen(place))
    job, checkpoint = chosen[-1]
    try:
        manifest = job.read_manifest(checkpoint)
    except (CheckpointError, StorageError) as error:
        raise CheckpointsError(f"{checkpoint.folder}: {error}") from None
    if manifest is None:
        raise CheckpointsError(f"{checkpoint.folder} is not committed: it has no manifest")
    _console().print(*_description(manifest), sep="\n", markup=False)
    return 0


def export_command(place: str, out: pathlib.Path, form: str) -> int:
    """The newest checkpoint, or the one named, as files that other programs read. Needs torch in this environment."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointsError(f"{out} is not empty: name a new folder with --to")
    job, checkpoint = list(_chosen(place))[-1]
    with tempfile.TemporaryDirectory(prefix=".lastwords-", dir=_existing_parent(out)) as folder:
        try:
            here = job.local_path(checkpoint, "")
            if here is None:
                copied = JobCheckpoints.at(folder, job.namespace, job.name)
                adopting.copy(job, copied, checkpoint)
                here = copied.location(checkpoint, "")
        except (StorageError, CheckpointError, adopting.NoSourceError) as error:
            raise CheckpointsError(str(error)) from None
        # Another process, since only the trainer's library has torch.
        line = [sys.executable, "-m", "lastwords.trainer.exporting", here, str(out), "--format", form]
        done = subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise CheckpointsError(f"{checkpoint.folder} could not be exported: {last.removeprefix('lastwords: ')}")
    _console().print(f"{checkpoint.folder} is in {out}", markup=False)
    return 0


def _existing_parent(path: pathlib.Path) -> pathlib.Path:
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _description(manifest: Manifest) -> Iterator[str]:
    plan = manifest.plan
    topology = plan.topology
    yield f"step {plan.step} of attempt {plan.attempt}, {plan.kind}, {size(manifest.nbytes)}"
    yield f"saved by {topology.workers} workers with {topology.processes_per_worker} ranks each"
    for entry in plan.lineage:
        yield f"  attempt {entry.attempt} went on from step {entry.step} of attempt {entry.parent}"
    for part in manifest.parts:
        data = f"{len(part.chunks)} chunks, {size(part.data.nbytes)} in {part.data.name}" if part.data else "no chunks"
        yield f"rank {part.rank}: {data}" + (f", {part.record.name}" if part.record else "")
    yield "tensors:"
    for chunk in sorted(plan.chunks):
        yield f"  {chunk.key}  {chunk.dtype}{list(chunk.sizes)}  {size(chunk.nbytes)}"


def _jobs(where: str) -> list[JobCheckpoints]:
    """Jobs whose checkpoints are there: it may be the storage, a namespace in it, or a job's own folder."""
    where = storage_of(_normal(where))
    if places.is_folder(where) and not os.path.isdir(where):
        raise CheckpointsError(f"{where} is not a folder")
    found = []
    try:
        store = places.open_store(where)
        for path in _claimed(store):
            home = f"{where}/{path}".rstrip("/")
            storage = places.parent(places.parent(home) or "")
            if storage is not None:
                found.append(JobCheckpoints.at(storage, *home.split("/")[-2:]))
    except StorageError as error:
        raise CheckpointsError(str(error)) from None
    if not found:
        raise CheckpointsError(f"{where} holds no checkpoints: no {CLAIM} of a storage folder is in it or below it")
    return found


def _claimed(store: Store) -> Iterator[str]:
    """Folders of jobs: what is given, or one or two levels below."""
    level = [""]
    for _ in range(3):
        below = []
        for path in level:
            names = _names(store, path)
            if CLAIM in names:
                yield path
            below += [f"{path}/{name}".lstrip("/") for name in names]
        level = below


def _names(store: Store, path: str) -> list[str]:
    try:
        return store.list(path)
    except StorageError as error:
        if error.kind == "gone" and path:
            return []  # a file
        raise


def _normal(where: str) -> str:
    try:
        return places.normal(where)
    except places.PlaceError as error:
        raise CheckpointsError(str(error)) from None


def storage_of(where: str) -> str:
    """The storage of the job whose folder this is; any other place is taken as it is."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(pathlib.Path(where, "job.json").read_text())["asked"]["storage"])
    return where


def _listed(job: JobCheckpoints) -> list[CheckpointInfo]:
    try:
        return job.list_checkpoints()
    except StorageError as error:
        raise CheckpointsError(str(error)) from None


def _chosen(where: str) -> Iterator[tuple[JobCheckpoints, CheckpointId]]:
    """The checkpoint that this is, or all that are in it."""
    where = _normal(where)
    one, above = parse_folder(where.rpartition("/")[2]), places.parent(where)
    if one is not None and above is not None:
        yield _jobs(above)[0], one
        return
    found = [(job, info.id) for job in _jobs(where) for info in _listed(job)]
    if not found:
        raise CheckpointsError(f"no committed checkpoint in {where}")
    yield from found


def _state(info: CheckpointInfo) -> str:
    if info.rejected:
        return escape(f"unusable: {info.rejected}")
    return "" if info.finite else "holds NaN or infinity"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def size(nbytes: int) -> str:
    """Bytes for people."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes} B"
