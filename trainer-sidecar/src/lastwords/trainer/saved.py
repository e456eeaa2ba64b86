"""The small records that a restore is given, and what has to come from other ranks' records where layouts differ."""

from __future__ import annotations

from typing import Any

from lastwords.protocol import codec, snapshots, tensorfile, wire
from lastwords.trainer import hoststate
from lastwords.trainer.hoststate import Record
from lastwords.trainer.reading import RestoreError

_MERGED = ("buffers", "extra", "aliases", "thawed")


class Saved:
    """
    What the records of a restore order say for one rank.

    `own` and `shared` are as `restoring.own_state` and `restoring.shared_state` made them. A record holds what its
    rank held. Where that were other tensors than this rank has now (pipeline stages that are cut elsewhere), the rest
    is taken from all other records that the order names.
    """

    def __init__(self, order: wire.RestoreOrder, rank: int, listing: str) -> None:
        """`listing`: digest of the names that this rank has. Raises RestoreError."""
        own, other = _read(order.record), _read(order.shared_record)
        if own is not None and not own.head.provisional:
            settings = own
        elif other is not None:
            settings = other
        else:
            raise RestoreError("no small record with what all ranks share (schedulers, optimizer settings) was given")
        source = own if own is not None else other
        assert source is not None
        self.is_own = own is not None and own.head.rank == rank
        """Whether random numbers and loader positions are those of this rank."""
        self.own: dict[str, Any] = source.part("own")
        self.shared: dict[str, Any] = settings.part("shared")
        self.settings_rank = settings.head.rank
        self.same_names = self.own["listing"] == listing
        """Whether the record is of a rank that held the same names."""
        if not self.same_names:
            self._merge(order)

    def _merge(self, order: wire.RestoreOrder) -> None:
        groups: dict[str, list[list[str]]] = self.own["added"]
        for file in order.other_records:
            record = _read(file)
            assert record is not None
            own = record.part("own")
            for part in _MERGED:
                self.own[part] = {**own[part], **self.own[part]}
            for name, added in own["added"].items():
                for mine, theirs in zip(groups.get(name, []), added, strict=False):
                    mine.extend(parameter for parameter in theirs if parameter not in mine)
            if not record.head.provisional:
                self.shared["values"] = {**record.part("shared")["values"], **self.shared["values"]}


def _read(file: wire.RestoreFile | None) -> Record | None:
    if file is None:
        return None
    try:
        with open(file.path, "rb") as stream:
            data = stream.read()
        if file.blocks and snapshots.block_checksums(data) != file.blocks:
            raise RestoreError(f"{file.path} is damaged (its checksum is not the one noted)")
        return hoststate.parse_record(data)
    except (OSError, codec.DecodeError, tensorfile.TensorFileError) as error:
        raise RestoreError(f"{file.path}: {error}") from None
