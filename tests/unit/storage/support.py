"""A small checkpoint: two ranks, three tensors, records."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from lastwords.protocol import chunks, pieces
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointId, CheckpointPlan, Manifest
from lastwords.protocol.pieces import Topology
from lastwords.storage import base
from lastwords.storage.base import Store
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.posix import PosixStore
from lastwords.storage.streams import Source

TOPOLOGY = Topology(workers=2, processes_per_worker=1)
UID = "uid-1"


def table() -> pieces.PieceTable:
    layout = [chunks.whole(name, "float32", (size,)) for name, size in (("a", 40), ("b", 7), ("c", 30))]
    return pieces.build_table({0: layout, 1: layout}, TOPOLOGY, 1)


def plan(step: int = 10, attempt: int = 1, kind: str = "periodic") -> CheckpointPlan:
    made = table()
    return CheckpointPlan(
        step=step, attempt=attempt, kind=kind, lineage=(LineageEntry(attempt, 0, 0),), topology=TOPOLOGY, generation=1,
        chunks=made.chunks, writers=pieces.assign_writes(made, [0, 1]).writes, record_ranks=(0, 1),
    )  # fmt: skip


def sources(made: CheckpointPlan) -> dict[int, Source]:
    """Each chunk's bytes name the chunk and the step."""
    result: dict[int, Source] = {}
    for index, chunk in enumerate(made.chunks):
        seed = f"{chunk.key}-{made.step}-".encode()
        data = (seed * chunk.nbytes)[: chunk.nbytes]
        result[index] = (memoryview(data), 0, len(data))
    return result


def write(job: JobCheckpoints, made: CheckpointPlan, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Claim, plan and the parts of these ranks."""
    job.claim(UID)
    made = job.write_plan(made)
    for rank in ranks:
        job.write_part(made, rank, sources(made), f"record of {rank} at {made.step}".encode())


def save(job: JobCheckpoints, step: int = 10, attempt: int = 1) -> Manifest:
    """A whole checkpoint."""
    made = plan(step, attempt)
    write(job, made)
    return job.commit(made)


def at(folder: pathlib.Path) -> JobCheckpoints:
    return JobCheckpoints.at(str(folder), "ns", "job")


def identify(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step=step, attempt=attempt)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checkpoints of one test go; `kind`: "links", "no links" or "s3"."""

    root: str
    kind: str

    def under(self, name: str) -> Place:
        """Another place, empty."""
        return Place(f"{self.root}/{name}", self.kind)

    def store(self, on_step: Callable[[str], None] | None = None) -> Store:
        """The store there."""
        if self.kind == "s3":
            from lastwords.storage import objects

            return objects.connect(self.root, on_step)
        store = PosixStore(self.root, on_step)
        store._links = self.kind == "links"
        return store

    def job(self, on_step: Callable[[str], None] | None = None) -> JobCheckpoints:
        """Checkpoints there."""
        return JobCheckpoints(self.store(on_step), "ns", "job")

    def files(self, step: int = 10) -> dict[str, bytes]:
        """Every file of a checkpoint by its path in the store."""
        store, folder = self.store(), f"ns/job/{identify(step).folder}"
        found = {f"{folder}/{name}": base.read(store, f"{folder}/{name}") for name in store.list(folder)}
        return {path: data for path, data in found.items() if data is not None}
