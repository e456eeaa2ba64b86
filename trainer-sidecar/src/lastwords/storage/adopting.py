"""
A job that goes on from a checkpoint of another one: that is copied into its own folder, checked, before it starts.

From then on it is the job's own: it is committed, found, kept and removed like any other, and where it came from may
go. A marker says that this was done, so that it is never done to a job that has made steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from lastwords.protocol import manifest
from lastwords.protocol.manifest import CheckpointId, Manifest, StoredFile
from lastwords.protocol.snapshots import BLOCK_BYTES
from lastwords.storage import base, places, retention, streams
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints

MARKER = "resumed.json"


class NoSourceError(ValueError):
    """There is nothing to go on from; the text says what was looked for."""


def find(place: str) -> tuple[JobCheckpoints, CheckpointId]:
    """
    The checkpoint at `place`: a job's folder, of which the newest good one is taken, or one checkpoint in it.

    Raises NoSourceError, StorageError.
    """
    where = places.normal(place)
    above, name = places.parent(where), where.rpartition("/")[2]
    chosen = manifest.parse_folder(name)
    home = above if chosen is not None and above is not None else where
    namespace = places.parent(home)
    storage = places.parent(namespace) if namespace is not None else None
    if namespace is None or storage is None:
        raise NoSourceError(f"{place} is not the folder of a job in a storage, nor a checkpoint in one")
    job = JobCheckpoints.at(storage, namespace.rpartition("/")[2], home.rpartition("/")[2])
    if chosen is not None:
        info = job.describe(chosen)
        if info is None or info.rejected:
            raise NoSourceError(
                f"{place} cannot be used: {info.rejected if info else 'no checkpoint was committed there'}"
            )
        return job, chosen
    good = [info.id for info in job.list_checkpoints() if info.finite and not info.rejected]
    if not good:
        raise NoSourceError(f"no committed checkpoint of a job is in {place}; name <storage>/<namespace>/<job>")
    return job, max(good, key=retention.age)


def adopt(job: JobCheckpoints, place: str, cancelled: Callable[[], bool] = lambda: False) -> CheckpointId | None:
    """
    Copy the checkpoint at `place` into the folder of `job`, unless this was done before or it has some of its own; the
    copy, or None. Raises NoSourceError, StorageError, CheckpointError, CancelledError.
    """
    if job.has_marker(MARKER):
        return None
    found: CheckpointId | None = None
    if not any(not info.rejected for info in job.list_checkpoints()):
        source, found = find(place)
        copy(source, job, found, cancelled)
    job.set_marker(MARKER, {"from": place, "checkpoint": found.folder if found is not None else ""})
    return found


def copy(
    source: JobCheckpoints,
    target: JobCheckpoints,
    checkpoint: CheckpointId,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Copy a committed checkpoint, checked on the way. Raises NoSourceError, StorageError, CheckpointError."""
    there = source.read_manifest(checkpoint)
    if there is None:
        raise NoSourceError(f"{source.location(checkpoint, manifest.MANIFEST)} is not there (any more)")
    for part in there.parts:
        for file in (part.data, part.record):
            if file is not None:
                pieces = _checked(source, there, file, cancelled)
                target.store.write(target.path(checkpoint, file.name), pieces, file.nbytes)
        _copy_small(source, target, checkpoint, manifest.part_record(part.rank))
    _copy_small(source, target, checkpoint, manifest.PLAN)
    # Last: it makes the copy a checkpoint.
    target.store.create(target.path(checkpoint, manifest.MANIFEST), manifest.encode_manifest(there))


def _checked(
    source: JobCheckpoints, there: Manifest, file: StoredFile, cancelled: Callable[[], bool]
) -> Iterator[bytes]:
    with source.store.open(source.path(there.id, file.name)) as reader:
        for number, expected in enumerate(file.blocks):
            if cancelled():
                raise streams.CancelledError("the copy was given up")
            data = reader.read_at(number * BLOCK_BYTES, BLOCK_BYTES)
            if zlib.crc32(data) != expected:
                raise CheckpointError(f"{there.id.folder}/{file.name}: block {number} is damaged (checksum)")
            yield data


def _copy_small(source: JobCheckpoints, target: JobCheckpoints, checkpoint: CheckpointId, name: str) -> None:
    body = base.read(source.store, source.path(checkpoint, name))
    if body is None:
        raise CheckpointError(f"{checkpoint.folder}/{name}: missing")
    target.store.write(target.path(checkpoint, name), [body], len(body))
