"""Writing a snapshot from memory to storage with checksums and fsync, beside `cp` and fsync of the same bytes."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

from lastwords.protocol import chunks, manifest, pieces, snapshots
from lastwords.protocol.lineage import LineageEntry
from lastwords.storage import checkpoints
from tests.bench import report


def _memory_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-", dir="/dev/shm"))


def cp_and_fsync(source: pathlib.Path, target: pathlib.Path) -> float:
    """Seconds of `cp` and a sync of the copy."""
    began = time.perf_counter()
    subprocess.run(["cp", str(source), str(target)], check=True)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began


def _persist(source: pathlib.Path, folder: pathlib.Path, table: pieces.PieceTable) -> float:
    """Seconds from the mapped slot to the committed checkpoint, as the agent does it."""
    ids = pieces.part_chunks(table)[0]
    _, ranges = pieces.part_layout(table, ids)
    plan = manifest.CheckpointPlan(
        step=1,
        attempt=1,
        kind="periodic",
        lineage=(LineageEntry(1, 0, 0),),
        topology=table.topology,
        generation=1,
        chunks=table.chunks,
        writers={0: ids},
        record_ranks=(),
    )
    descriptor = os.open(source, os.O_RDONLY)
    try:
        began = time.perf_counter()
        job = checkpoints.JobCheckpoints.at(str(folder), "default", "bench")
        job.write_plan(plan)
        job.write_part(plan, 0, {i: (descriptor, *ranges[i]) for i in ids}, None)
        job.commit(plan)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def main(quick: bool = False) -> None:
    """All rows of this topic."""
    rows: list[report.Row] = []
    for megabytes in [50] if quick else [50, 1000]:
        topology = pieces.Topology(workers=1, processes_per_worker=1)
        layout = [chunks.whole(f"t{i}", "float32", (megabytes * 1_000_000 // 4 // 40,)) for i in range(40)]
        table = pieces.build_table({0: layout}, topology, 1)
        ids = pieces.part_chunks(table)[0]
        header, ranges = pieces.part_layout(table, ids)
        nbytes = max(end for _, end in ranges.values())
        memory, disk = _memory_folder(), pathlib.Path(tempfile.mkdtemp(prefix="lw-bench-"))
        try:
            source = memory / "part"
            source.write_bytes(header + os.urandom(1_000_000) * (nbytes // 1_000_000 + 1))
            os.truncate(source, nbytes)
            mine, theirs, sums = [], [], []
            for repeat in range(5 if megabytes < 500 else 3):
                mine.append(_persist(source, disk / f"job-{repeat}", table))
                theirs.append(cp_and_fsync(source, disk / f"copy-{repeat}"))
                began = time.perf_counter()
                data = source.read_bytes()
                for begin in range(0, nbytes, snapshots.BLOCK_BYTES):
                    zlib.crc32(memoryview(data)[begin : begin + snapshots.BLOCK_BYTES])
                sums.append(time.perf_counter() - began)
            rows.append(
                report.at_most(
                    f"persist {megabytes} MB with checksums, fsync and commit",
                    report.median(mine),
                    "s",
                    "cp + fsync",
                    report.median(theirs),
                    1 / 0.8,
                )
            )
            rows.append(report.information(f"reading and summing {megabytes} MB alone", report.median(sums), "s"))
        finally:
            shutil.rmtree(memory)
            shutil.rmtree(disk)
    report.publish("persist", rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
