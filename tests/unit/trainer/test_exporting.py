"""A sharded checkpoint in the forms that other programs read: whole tensors, bit by bit, and all else beside them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastwords.protocol import pieces
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.lineage import LineageEntry
from lastwords.protocol.manifest import CheckpointPlan
from lastwords.protocol.pieces import Topology
from lastwords.protocol.snapshots import RecordHead
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.trainer import exporting, hoststate
from lastwords.trainer.reading import RestoreError

TENSORS = {
    "model.weight": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "model.half": torch.arange(6, dtype=torch.bfloat16),
    "optimizer.state.model.weight.exp_avg": torch.arange(35, dtype=torch.float32).reshape(7, 5) / 7,
    "optimizer.state.model.weight.step": torch.tensor(12.0),
}
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}]
BUFFERS = {"model.norm.running_mean": torch.tensor([1.0, 2.0])}


def save(folder: pathlib.Path) -> pathlib.Path:
    """Two ranks hold four and three rows of everything that has rows; the rest is rank 0's. Its folder."""
    topology = Topology(workers=1, processes_per_worker=2)
    layouts: dict[int, list[Chunk]] = {0: [], 1: []}
    for name, tensor in TENSORS.items():
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if tensor.dim() == 2:
            layouts[0].append(Chunk(name, (0, 0), (4, 5), shape, dtype))
            layouts[1].append(Chunk(name, (4, 0), (3, 5), shape, dtype))
        else:
            layouts[0].append(Chunk(name, (0,) * len(shape), shape, shape, dtype))
    table = pieces.build_table(layouts, topology, 1)
    plan = CheckpointPlan(
        step=12, attempt=1, kind="final", lineage=(LineageEntry(1, 0, 0),), topology=topology, generation=1,
        chunks=table.chunks, writers=pieces.assign_writes(table, [0, 1]).writes, record_ranks=(0, 1),
    )  # fmt: skip
    job = JobCheckpoints.at(str(folder), "ns", "job")
    job.claim("uid")
    job.write_plan(plan)
    sources = {}
    for number, chunk in enumerate(plan.chunks):
        rows = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        data = TENSORS[chunk.name][rows].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        sources[number] = (memoryview(data), 0, len(data))
    for rank in (0, 1):
        job.write_part(plan, rank, sources, record(rank))
    job.commit(plan)
    return folder / "ns/job" / "step-000000000012-a1"


def record(rank: int) -> bytes:
    own = {
        "buffers": {name: value + rank for name, value in BUFFERS.items()}, "extra": {}, "listing": "", "added": {},
        "thawed": {}, "aliases": {"model.tied": "model.weight"},
    }  # fmt: skip
    shared = {
        "optimizers": {"optimizer": GROUPS}, "values": {"optimizer.state.model.half.count": 3},
        "common": {"scheduler": {"last_epoch": 12, "milestones": {3: 1}}},
    }  # fmt: skip
    head = RecordHead(step=12, attempt=1, rank=rank, generation=1, provisional=False, exact=True)
    return hoststate.build_record(head, hoststate.encode_part("own", own), hoststate.encode_part("shared", shared))


def same(state: dict[str, Any], key: int | str = 3) -> None:
    """What was saved, all of it. `key`: what became of a key that was a number."""
    model, optimizer = state["model"], state["optimizer"]
    assert set(model) == {"weight", "half", "norm.running_mean", "tied"}
    for name in ("weight", "half"):
        assert torch.equal(model[name], TENSORS[f"model.{name}"])
    assert torch.equal(model["tied"], model["weight"])
    assert torch.equal(model["norm.running_mean"], BUFFERS["model.norm.running_mean"])
    slots = optimizer["state"]["model.weight"]
    assert torch.equal(slots["exp_avg"], TENSORS["optimizer.state.model.weight.exp_avg"])
    assert torch.equal(slots["step"], TENSORS["optimizer.state.model.weight.step"])
    assert optimizer["state"]["model.half"] == {"count": 3}
    assert optimizer["param_groups"] == GROUPS
    assert state["scheduler"] == {"last_epoch": 12, "milestones": {key: 1}}
    assert state["step"] == 12


def test_as_torch_saves_it(tmp_path: pathlib.Path) -> None:
    exporting.write(exporting.read_state(str(save(tmp_path / "storage"))), str(tmp_path / "out"), "torch")
    same(torch.load(tmp_path / "out" / "state.pt", weights_only=True))


def test_as_a_distributed_checkpoint(tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    exporting.write(exporting.read_state(str(save(tmp_path / "storage"))), str(tmp_path / "out"), "dcp")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "state.pt")
    same(torch.load(tmp_path / "state.pt", weights_only=True), key="3")


def test_as_safetensors(tmp_path: pathlib.Path) -> None:
    exporting.write(exporting.read_state(str(save(tmp_path / "storage"))), str(tmp_path / "out"), "safetensors")
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(model["weight"], TENSORS["model.weight"])
    assert torch.equal(model["half"], TENSORS["model.half"])
    optimizer = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert set(optimizer) == {"state.model.weight.exp_avg", "state.model.weight.step"}
    rest = hoststate.decode(json.loads((tmp_path / "out" / "state.json").read_text()), hoststate.Table())
    assert rest["step"] == 12
    assert rest["optimizer"]["param_groups"] == GROUPS
    assert rest["scheduler"] == {"last_epoch": 12, "milestones": {3: 1}}


def test_a_damaged_checkpoint_is_not_exported(tmp_path: pathlib.Path) -> None:
    folder = save(tmp_path)
    path = folder / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(RestoreError, match="damaged"):
        exporting.read_state(str(folder))
