"""
Ranks of a layout as processes of their own, forked from one interpreter that has torch loaded.

    python -m tests.processes.layouts.worlds FOLDER

trains every layout with 8 ranks, some with 4, and saves it (`save`), then restores these in 1, 4 and 8 ranks into every
layout (`restore`) and compares with the whole state. Prints one line of JSON for each comparison.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which torch imports at the first update: once here instead of in every rank
import torch.distributed as dist

from lastwords.protocol import codec, pieces, volume, wire
from lastwords.protocol.manifest import MANIFEST, CheckpointId, CheckpointPlan, Manifest, StoredFile
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.pieces import PieceTable, Topology
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.streams import Source
from lastwords.trainer import copying, layouts, parts, restoring, slots, staging
from lastwords.trainer.collect import Collector
from lastwords.trainer.recording import Recorder
from tests.processes.layouts import models

STEPS = 2
SAVED = {8: models.KINDS, 4: ("fsdp", "pp-tp-dp")}
"""What is saved in how many ranks."""
ID = CheckpointId(step=STEPS, attempt=1)


def folder_of(base: pathlib.Path, kind: str, world: int) -> pathlib.Path:
    """Where a layout was saved: parts as in a memory volume, `checkpoints`, and `full.pt`, the whole state."""
    return base / f"{kind}-{world}"


def topology(world: int) -> Topology:
    """Two workers."""
    return Topology(workers=2, processes_per_worker=world // 2)


def load_table(folder: pathlib.Path) -> PieceTable:
    """Of a saved layout."""
    return codec.loads(PieceTable, (folder / volume.LAYOUT).read_bytes())


# --- save -------------------------------------------------------------------------------------------


def save(base: pathlib.Path, world: int, rank: int) -> None:
    """Train and save each layout."""
    store = _store()
    for number, kind in enumerate(SAVED[world]):
        parallel = models.build(kind, seed=1)
        given = parts.sort({"model": parallel.model, "optimizer": parallel.optimizer})
        collector = Collector(given)
        for step in range(STEPS):
            parallel.update(step)
        assert collector.refresh(), "optimizer state is new"
        assert not collector.refresh(), "nothing has changed since"
        layout = collector.state.chunks
        table, _ = layouts.exchange(store, number, rank, layout, None, topology(world), lambda: False)
        folder = folder_of(base, kind, world)
        folder.mkdir(exist_ok=True)
        _write_memory(folder, table, rank, collector)
        (folder / f"record-{rank}").write_bytes(Recorder(given, collector, rank, 1, None).build(STEPS, 1))
        full = models.full_state(parallel)
        parallel.update(STEPS)
        after = models.full_state(parallel)
        if rank == 0:
            layouts.write_table(str(folder), table, rank)
            torch.save({"full": full, "after": after}, folder / "full.pt")
            _write_checkpoint(folder, table)
        dist.barrier()


def _write_memory(folder: pathlib.Path, table: PieceTable, rank: int, collector: Collector) -> None:
    """This rank's part, and in `live-<rank>` everything that it holds."""
    part = copying.PartCopy(table, rank, collector.state.stable)
    slot = slots.Slot(str(folder), 0, rank)
    data = slot.resize(part.nbytes)
    part.run(data)
    staging.commit(slot, part, data, STEPS, 1, table.generation)
    held = [index for piece in table.pieces if piece.holders >> rank & 1 for index in piece.chunk_ids]
    header, _ = pieces.part_layout(table, held)
    live = slots.Mapped(str(folder / f"live-{rank}"), _end(table, held))
    live.view[: len(header)] = header
    mine = copying.by_name(collector.state.stable)
    for index, (begin, end) in pieces.part_layout(table, held)[1].items():
        copying.copy_out(copying.box(table.chunks[index], mine), live.address + begin, end - begin)


def _end(table: PieceTable, ids: list[int]) -> int:
    header, places = pieces.part_layout(table, ids)
    return max((end for _, end in places.values()), default=len(header))


def _write_checkpoint(folder: pathlib.Path, table: PieceTable) -> None:
    """As the agents do: each chunk once, from the parts."""
    ranks = range(table.topology.world)
    assigned = pieces.assign_writes(table, ranks)
    assert not assigned.missing
    plan = CheckpointPlan(
        step=STEPS, attempt=1, kind="periodic", lineage=(), topology=table.topology, generation=1,
        chunks=table.chunks, writers=assigned.writes, record_ranks=tuple(ranks),
    )  # fmt: skip
    job = checkpoints(folder)
    job.write_plan(plan)
    for rank in ranks:
        _, places = copying.part_places(table, rank)
        data = memoryview((folder / volume.part(0, rank)).read_bytes())
        sources: dict[int, Source] = {index: (data, begin, end) for index, (begin, end) in places.items()}
        job.write_part(plan, rank, sources, (folder / f"record-{rank}").read_bytes())
    job.commit(plan)


# --- restore ----------------------------------------------------------------------------------------


def checkpoints(folder: pathlib.Path) -> JobCheckpoints:
    """Of a saved layout."""
    return JobCheckpoints.at(str(folder / "checkpoints"), "default", "job")


def restore(base: pathlib.Path, world: int, rank: int) -> None:
    """Saved layouts into the layouts of this world, see `pairs`."""
    for source, source_world, target in pairs(world):
        folder = folder_of(base, source, source_world)
        wanted = torch.load(folder / "full.pt", weights_only=True)
        problem = _restored(folder, target, rank, wanted, same=(source, source_world) == (target, world))
        if world > 1:
            problems: list[Any] = [None] * world
            dist.all_gather_object(problems, problem)
            problem = "; ".join(f"rank {number}: {text}" for number, text in enumerate(problems) if text)
        if rank == 0:
            row = {"source": source, "from": source_world, "target": target, "to": world, "problem": problem}
            print(json.dumps(row), flush=True)


def pairs(world: int) -> list[tuple[str, int, str]]:
    """
    (source, its world, target) of the restores in `world` ranks: one rank reads everything; four read every layout of
    eight into every layout; eight read their own layout again, and layouts of four.
    """
    if world == 1:
        return [(kind, count, "single") for count, kinds in SAVED.items() for kind in kinds]
    if world == 4:
        return [(source, 8, target) for source in models.KINDS for target in models.KINDS]
    return [*((kind, 8, kind) for kind in models.KINDS), ("fsdp", 4, "tp-fsdp"), ("pp-tp-dp", 4, "hsdp")]


def _restored(folder: pathlib.Path, target: str, rank: int, wanted: dict[str, Any], *, same: bool) -> str:
    """What is wrong; "" when nothing."""
    parallel = models.build(target, seed=2 + rank % 2 * (target in ("ddp", "zero")))
    given = parts.sort({"model": parallel.model, "optimizer": parallel.optimizer})
    collector = Collector(given)
    places = {live.chunk.name: (live.local.data_ptr(), id(live.tensor)) for live in collector.state.stable}
    steps: list[int] = []
    parallel.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    restored = restoring.restore(order(folder, rank), given, collector, rank, alone=not dist.is_initialized())
    if steps:
        return "the optimizer made a step"
    now = {live.chunk.name: (live.local.data_ptr(), id(live.tensor)) for live in collector.state.stable}
    if any(now.get(name) != place for name, place in places.items()):
        return "parameters were replaced"
    problem = models.difference(parallel, wanted["full"])
    names = {live.chunk.name for live in collector.state.stable} | collector.state.empty
    if not problem and not restored.elsewhere.isdisjoint(names):
        problem = "tensors that are here are looked for elsewhere"
    if not problem and any(bool((seen != STEPS).any()) for seen in parallel.model.buffers()):
        problem = "buffers are not those of any rank"
    if same:
        parallel.update(STEPS)
        after = models.difference(parallel, wanted["after"])
        problem = problem or (after and f"after one more step: {after}")
    return problem


def order(folder: pathlib.Path, rank: int) -> wire.RestoreOrder:
    """From the checkpoint of a saved layout, as an agent gives it."""
    job = checkpoints(folder)
    found = job.read_manifest(ID)
    assert found is not None
    records = {part.rank: _file(job, part.record) for part in found.parts if part.record}
    own = records.get(rank)
    return wire.RestoreOrder(
        source=RestoreSource.CHECKPOINT, step=STEPS, attempt=1, files=files(job, found),
        chunks_path=job.location(ID, MANIFEST), record=own, shared_record=None if own else records[0],
        other_records=tuple(file for other, file in records.items() if other != rank),
    )  # fmt: skip


def files(job: JobCheckpoints, found: Manifest) -> tuple[wire.RestoreFile, ...]:
    """The data files of a checkpoint."""
    return tuple(_file(job, part.data) for part in found.parts if part.data)


def _file(job: JobCheckpoints, stored: StoredFile) -> wire.RestoreFile:
    return wire.RestoreFile(path=job.location(ID, stored.name), blocks=stored.blocks, nbytes=stored.nbytes)


# --- processes --------------------------------------------------------------------------------------


def _store() -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=60), wait_for_workers=False)


def in_ranks(world: int, work: Callable[[int, int], None]) -> None:
    """Run `work(world, rank)` in `world` forked processes of a gloo group. Raises RuntimeError when one fails."""
    reader, writer = os.pipe()
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(_child(world, rank, work, reader, writer))
        children.append(child)
    os.close(reader)
    os.close(writer)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")


def _child(world: int, rank: int, work: Callable[[int, int], None], reader: int, writer: int) -> int:
    try:
        torch.set_num_threads(1)
        # Rank 0 hosts the store and tells the others its port: a parent with threads could not be forked safely.
        store = _host() if rank == 0 else None
        if store is not None:
            os.write(writer, f"{store.port:06d}".encode() * world)
        port = str(int(os.read(reader, 6)))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if world > 1:
            dist.init_process_group("gloo")
        work(world, rank)
        if world > 1:
            dist.barrier()
            if rank == 0:
                time.sleep(0.2)  # the others leave before the store does
        sys.stdout.flush()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def _host() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)


def main() -> None:
    """See above."""
    base = pathlib.Path(sys.argv[1])

    def save_and_restore(world: int, rank: int) -> None:
        save(base, world, rank)
        restore(base, world, rank)

    in_ranks(4, lambda world, rank: save(base, world, rank))
    in_ranks(8, save_and_restore)
    for world in (1, 4):
        in_ranks(world, lambda world, rank: restore(base, world, rank))


if __name__ == "__main__":
    main()
