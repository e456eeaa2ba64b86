"""`lastwords checkpoints`: look at what is in storage; no job has to run."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lastwords.protocol.manifest import CLAIM, CheckpointId, Manifest, parse_folder
from lastwords.protocol.messages import CheckpointInfo
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints

DAMAGED = 1
"""Exit code when a checkpoint does not verify."""


class CheckpointsError(Exception):
    """Not a storage folder, or nothing in it; the text says what was looked for."""


def list_command(folder: pathlib.Path) -> int:
    """One line for each committed checkpoint, oldest first; those that cannot be used with the reason."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "step", "attempt", "kind", "size", "", "folder"):
        table.add_column(name, justify="right" if name in ("step", "attempt", "size") else "left")
    for job in _jobs(folder):
        for info in _listed(job):
            row = [f"{job.namespace}/{job.name}", str(info.id.step), str(info.id.attempt), info.kind]
            table.add_row(*row, size(info.nbytes), _state(info), escape(info.id.folder))
    _console().print(table if table.row_count else "no committed checkpoint")
    return 0


def verify_command(folder: pathlib.Path) -> int:
    """Read every byte; 1 when anything is wrong with any checkpoint."""
    console = _console()
    damaged = False
    for job, checkpoint in _chosen(folder):
        try:
            problems = job.verify(checkpoint)
        except StorageError as error:
            problems = [str(error)]
        damaged |= bool(problems)
        console.print(f"{checkpoint.folder}: {'whole' if not problems else 'DAMAGED'}", markup=False)
        for problem in problems:
            console.print(f"  {problem}", markup=False)
    return DAMAGED if damaged else 0


def show_command(folder: pathlib.Path) -> int:
    """What is in the newest checkpoint, or in the one named: who wrote what, and every tensor."""
    chosen = list(_chosen(folder))
    job, checkpoint = chosen[-1]
    try:
        manifest = job.read_manifest(checkpoint)
    except (CheckpointError, StorageError) as error:
        raise CheckpointsError(f"{checkpoint.folder}: {error}") from None
    if manifest is None:
        raise CheckpointsError(f"{checkpoint.folder} is not committed: it has no manifest")
    _console().print(*_description(manifest), sep="\n", markup=False)
    return 0


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


def _jobs(folder: pathlib.Path) -> list[JobCheckpoints]:
    """Jobs whose checkpoints are in the folder: it may be the storage, a namespace in it, or a job's own."""
    if not folder.is_dir():
        raise CheckpointsError(f"{folder} is not a folder")
    folder = storage_of(folder.resolve())
    claims = [path for pattern in (CLAIM, f"*/{CLAIM}", f"*/*/{CLAIM}") for path in sorted(folder.glob(pattern))]
    homes = [path.parent for path in claims]
    if not homes:
        raise CheckpointsError(f"{folder} holds no checkpoints: no {CLAIM} of a storage folder is in it or below it")
    return [JobCheckpoints.at(str(home.parent.parent), home.parent.name, home.name) for home in homes]


def storage_of(folder: pathlib.Path) -> pathlib.Path:
    """The storage of the job whose folder this is; any other folder is taken as it is."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return pathlib.Path(json.loads((folder / "job.json").read_text())["asked"]["storage"])
    return folder


def _listed(job: JobCheckpoints) -> list[CheckpointInfo]:
    try:
        return job.list_checkpoints()
    except StorageError as error:
        raise CheckpointsError(str(error)) from None


def _chosen(folder: pathlib.Path) -> Iterator[tuple[JobCheckpoints, CheckpointId]]:
    """The checkpoint that `folder` is, or all that are in it."""
    one = parse_folder(folder.resolve().name)
    if one is not None:
        yield _jobs(folder.resolve().parent)[0], one
        return
    found = [(job, info.id) for job in _jobs(folder) for info in _listed(job)]
    if not found:
        raise CheckpointsError(f"no committed checkpoint in {folder}")
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
