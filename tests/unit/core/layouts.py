"""Piece tables of the usual parallel layouts on eight ranks, from real chunks."""

from __future__ import annotations

from collections.abc import Callable

from lastwords.protocol import pieces
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.pieces import PieceTable, Topology

_ROWS, _COLUMNS, _LAYERS = 16, 8, 4


def _rows(name: str, index: int, count: int) -> Chunk:
    size = _ROWS // count
    return Chunk(name, (index * size, 0), (size, _COLUMNS), (_ROWS, _COLUMNS), "float32")


def _ddp(rank: int) -> list[Chunk]:
    return [_rows(f"layer{n}", 0, 1) for n in range(_LAYERS)]


def _fsdp(rank: int) -> list[Chunk]:
    return [_rows(f"layer{n}", rank, 8) for n in range(_LAYERS)]


def _hsdp(rank: int) -> list[Chunk]:
    return [_rows(f"layer{n}", rank % 4, 4) for n in range(_LAYERS)]


def _tp_dp(rank: int) -> list[Chunk]:
    return [*(_rows(f"layer{n}", rank % 2, 2) for n in range(_LAYERS)), _rows("norm", 0, 1)]


def _pp_tp_dp(rank: int) -> list[Chunk]:
    stage = rank // 4
    own = [_rows(f"layer{n}", rank % 2, 2) for n in range(_LAYERS) if n % 2 == stage]
    return [*own, _rows(f"norm{stage}", 0, 1)]


LAYOUTS: dict[str, Callable[[int], list[Chunk]]] = {
    "DDP8": _ddp,
    "FSDP8": _fsdp,
    "HSDP2x4": _hsdp,
    "TP2xDP4": _tp_dp,
    "PP2xTP2xDP2": _pp_tp_dp,
}


def table(name: str, topology: Topology) -> PieceTable:
    """The table of a layout."""
    layout = LAYOUTS[name]
    return pieces.build_table({rank: layout(rank) for rank in range(topology.world)}, topology, generation=1)
