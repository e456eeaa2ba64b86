"""Saves the state of one process into files, as under a runner, and restores it into other objects."""

from __future__ import annotations

import pathlib
from typing import Any

from lastwords.protocol import pieces, volume, wire
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.pieces import Topology
from lastwords.trainer import copying, layouts, parts, restoring, slots, staging
from lastwords.trainer.collect import Collector
from lastwords.trainer.parts import Parts
from lastwords.trainer.recording import Recorder
from lastwords.trainer.restoring import Restored

STEP = 5


class Process:
    """What a Checkpointer makes of the parts that it is given."""

    def __init__(self, **given: Any) -> None:
        self.parts: Parts = parts.sort(given)
        self.collector = Collector(self.parts)

    def save(self, folder: pathlib.Path, rank: int = 0) -> None:
        """Part, layout and record."""
        folder.mkdir(exist_ok=True)
        self.collector.refresh()
        table = pieces.build_table({0: self.collector.state.chunks}, Topology(workers=1, processes_per_worker=1), 1)
        part = copying.PartCopy(table, 0, self.collector.state.stable)
        slot = slots.Slot(str(folder), 0, 0)
        data = slot.resize(part.nbytes)
        part.run(data)
        staging.commit(slot, part, data, STEP, 1, 1)
        layouts.write_table(str(folder), table, 0)
        (folder / "record").write_bytes(Recorder(self.parts, self.collector, rank, 1, None).build(STEP, 1))

    def restore(self, *folders: pathlib.Path, rank: int = 0, alone: bool = True) -> Restored:
        """From the first folder; the other ones are those of other ranks."""
        return restoring.restore(order(*folders), self.parts, self.collector, rank, alone=alone)


def order(*folders: pathlib.Path) -> wire.RestoreOrder:
    """As from an agent."""
    records = [_file(folder / "record") for folder in folders]
    return wire.RestoreOrder(
        source=RestoreSource.MEMORY, step=STEP, attempt=1, files=tuple(_file(f / volume.part(0, 0)) for f in folders),
        chunks_path=str(folders[0] / volume.LAYOUT), record=records[0], other_records=tuple(records[1:]),
    )  # fmt: skip


def _file(path: pathlib.Path) -> wire.RestoreFile:
    return wire.RestoreFile(path=str(path), blocks=(), nbytes=0)
