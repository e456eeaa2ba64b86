"""Reading tensor files straight into tensors: any cut, any stride, and every damaged byte is found."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import resource

import pytest
import torch

from lastwords.protocol import snapshots, wire
from lastwords.protocol.chunks import Chunk
from lastwords.trainer import memory, reading
from lastwords.trainer.collect import Live


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(reading, "_STRIDE_BYTES", 700)


def _file(folder: pathlib.Path, seed: int) -> tuple[wire.RestoreFile, dict[str, tuple[int, int]], bytes]:
    """A file of tensors with gaps between them, and where each lies."""
    draw = random.Random(seed)
    places, at = {}, draw.randrange(9000)
    for number in range(draw.randint(1, 8)):
        size = 4 * draw.choice([0, 1, 5, 300, 1024, 5000])
        places[f"t{number}"] = (at, at + size)
        at += size + draw.choice([0, 0, 1, 64, 9000])
    data = draw.randbytes(at)
    path = folder / f"file-{seed}"
    path.write_bytes(data)
    return wire.RestoreFile(path=str(path), blocks=snapshots.block_checksums(data), nbytes=at), places, data


def _fill(file: wire.RestoreFile, places: dict[str, tuple[int, int]], names: list[str]) -> dict[str, torch.Tensor]:
    targets, sources = [], {}
    for name in names:
        begin, end = places[name.rstrip("'")]
        count = (end - begin) // 4
        chunk = Chunk(name=name, dtype="int32", shape=(count,), offsets=(0,), sizes=(count,))
        tensor = torch.full((count,), -1, dtype=torch.int32)
        targets.append(Live(chunk=chunk, tensor=tensor, local=tensor))
        sources[name] = [reading.Source(chunk, file, begin, end)]
    reading.fill(targets, sources)
    return {live.chunk.name: live.local for live in targets}


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_comes_to_its_place(tmp_path: pathlib.Path, seed: int) -> None:
    file, places, data = _file(tmp_path, seed)
    draw = random.Random(seed)
    names = [name for name in places if draw.random() < 0.7]
    # Tied tensors are kept once: two targets from the same bytes.
    names += [f"{name}'" for name in names if draw.random() < 0.3]
    for given in (file, dataclasses.replace(file, checked=True), dataclasses.replace(file, blocks=())):
        for name, tensor in _fill(given, places, names).items():
            begin, end = places[name.rstrip("'")]
            assert tensor.numpy().tobytes() == data[begin:end], name


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_byte_in_a_block_that_is_read_is_an_error(tmp_path: pathlib.Path, seed: int) -> None:
    file, places, data = _file(tmp_path, seed)
    draw = random.Random(seed)
    places = {name: place for name, place in places.items() if place[0] < place[1]}
    assert places, "every seed here has a tensor that is not empty"
    begin, end = places[name := draw.choice(sorted(places))]
    size = snapshots.BLOCK_BYTES
    # Anywhere in those blocks, between tensors too: a checksum is one of a whole block.
    at = draw.randrange(begin // size * size, min(-(-end // size) * size, len(data)))
    pathlib.Path(file.path).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(reading.RestoreError, match=f"block {at // size} is damaged"):
        _fill(file, places, [name])
    _fill(dataclasses.replace(file, checked=True), places, [name])  # it was told that somebody has looked


def test_a_file_that_ends_early_is_an_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(5000))
    file = wire.RestoreFile(path=str(path), blocks=(), nbytes=9000)
    with pytest.raises(reading.RestoreError, match="ends at 5000 bytes"):
        _fill(file, {"t": (4000, 8000)}, ["t"])


def test_memory_is_made_in_one_go_and_keeps_its_contents() -> None:
    tensor = torch.empty(64 << 20, dtype=torch.uint8)
    tensor[:5], tensor[-5:] = 7, 9
    memory.populate(tensor.data_ptr(), tensor.numel())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor[5:-5] = 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # of 16384 pages
    assert (tensor[:5] == 7).all() and (tensor[-5:] == 9).all()
    memory.populate(1 << 60, 4096)  # nothing there: nothing happens
