"""The safetensors format, against the reference implementation and against damage."""

from __future__ import annotations

import json
import pathlib
import struct

import pytest
import safetensors.torch
import torch

from lastwords.protocol import tensorfile

TENSORS = {
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def write(path: pathlib.Path) -> tuple[tensorfile.Entry, ...]:
    rows = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()]
    header, entries = tensorfile.build_header(rows, {"head": "{}"})
    data = bytearray(header)
    for tensor in TENSORS.values():
        data += bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    path.write_bytes(data)
    return entries


def test_the_reference_reader_opens_what_we_write(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_data_begins_at_a_page_so_that_wide_items_are_aligned(tmp_path: pathlib.Path) -> None:
    entries = write(tmp_path / "a.safetensors")
    assert entries[0].begin % tensorfile.ALIGNMENT == 0


def test_we_open_what_the_reference_writer_writes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "b.safetensors"
    safetensors.torch.save_file(TENSORS, path, metadata={"who": "reference"})
    data = path.read_bytes()
    entries, metadata = tensorfile.parse_header(data[: tensorfile.header_bytes(data[:8])], len(data))
    assert metadata == {"who": "reference"}
    for entry in entries:
        tensor = TENSORS[entry.name].reshape(-1).view(torch.uint8)
        assert data[entry.begin : entry.end] == bytes(tensor.numpy())
        assert entry.shape == tuple(TENSORS[entry.name].shape)


def test_every_truncation_is_noticed(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    for length in [0, 7, 8, 100, 4095, 4096, len(data) - 1]:
        with pytest.raises(tensorfile.TensorFileError):
            tensorfile.parse_header(data[:length], length)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"shape": [1]}},
        {"a": 5},
        [],
    ],
)
def test_a_header_that_lies_is_refused(header: object) -> None:
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + b"\0" * 64
    with pytest.raises(tensorfile.TensorFileError):
        tensorfile.parse_header(data, len(data))


def test_an_absurd_header_length_is_refused_before_it_is_read() -> None:
    with pytest.raises(tensorfile.TensorFileError, match="absurd"):
        tensorfile.header_bytes(struct.pack("<Q", 1 << 60))
