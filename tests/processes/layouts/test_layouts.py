"""Every layout restores into every other one, and what survivors cover is what can be restored from them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from lastwords.protocol import chunks, pieces, volume, wire
from lastwords.trainer import reading
from lastwords.trainer.collect import Live
from lastwords_operator.core import coverage
from tests.processes.layouts import models, worlds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECOVERABLE = {
    "ddp": (255, 81), "fsdp": (1, 1), "hsdp": (81, 81), "tp-dp": (225, 81), "tp-fsdp": (1, 1), "pp-tp-dp": (81, 1),
    "zero": (1, 1),
}  # fmt: skip
"""Sets of survivors of 8 ranks on 2 workers that can restore from what they hold live, and from their parts only."""
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, Any]]]:
    """Where the layouts were saved, and what came of the restores."""
    base = tmp_path_factory.mktemp("layouts")
    command = [sys.executable, "-m", "tests.processes.layouts.worlds", str(base)]
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return base, [json.loads(line) for line in done.stdout.splitlines()]


def test_each_layout_restores_into_the_others_bit_for_bit(saved: tuple[pathlib.Path, list[dict[str, Any]]]) -> None:
    """In place, without a step of the optimizer; a further step then gives what it would have given."""
    rows = saved[1]
    assert [row for row in rows if row["problem"]] == []
    done = {(row["to"], row["source"], row["from"], row["target"]) for row in rows}
    assert done == {(world, *pair) for world in (1, 4, 8) for pair in worlds.pairs(world)}


@pytest.mark.parametrize("kind", models.KINDS)
def test_what_survivors_cover_is_what_can_be_restored(
    saved: tuple[pathlib.Path, list[dict[str, Any]]], kind: str
) -> None:
    """
    For each set of survivors of eight ranks, a restore from what they hold live, and one from their parts only: it
    succeeds, with the whole state, exactly where the coordinator would say so.
    """
    folder = worlds.folder_of(saved[0], kind, 8)
    table = worlds.load_table(folder)
    summary = pieces.summarise(table)
    whole: dict[str, torch.Tensor] = torch.load(folder / "full.pt", weights_only=True)["full"]
    empty = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
    targets = [
        Live(chunks.whole(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor, tensor)
        for name, tensor in empty.items()
    ]
    for live in (True, False):
        names = [f"live-{rank}" if live else volume.part(0, rank) for rank in range(8)]
        held = [
            reading.find_sources([wire.RestoreFile(path=str(folder / name), blocks=(), nbytes=0)], table.chunks)
            for name in names
        ]
        counted = 0
        for survivors in range(1, 256):
            ranks = pieces.bits(survivors)
            if coverage.recoverable(summary, **{"live" if live else "parts": ranks}):
                counted += 1
                for target in targets:
                    target.local.fill_(7)
                reading.fill(targets, _together(held, ranks))
                assert all(torch.equal(empty[name], tensor) for name, tensor in whole.items()), ranks
            else:
                with pytest.raises(reading.RestoreError, match="is not in the files"):
                    reading.fill(targets, _together(held, ranks))
        assert counted == RECOVERABLE[kind][0 if live else 1]


def _together(held: list[dict[str, list[reading.Source]]], ranks: list[int]) -> dict[str, list[reading.Source]]:
    """What these ranks have, each chunk once."""
    found: dict[str, dict[str, reading.Source]] = {}
    for rank in ranks:
        for name, sources in held[rank].items():
            for source in sources:
                found.setdefault(name, {}).setdefault(source.chunk.key, source)
    return {name: list(sources.values()) for name, sources in found.items()}
