"""Optimizer state of sharded parameters that does not exist yet is made as the optimizer would have made it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.unit.trainer.one_process import Process


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A mesh of one rank is enough to have DTensors."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class RowWise(torch.optim.Optimizer):
    """Keeps a moment of the parameter's shape, one value per row, and a count that is no tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(count=0, moment=torch.zeros_like(parameter), rows=parameter.new_zeros(parameter.shape[:1]))
            state["count"] += 1
            state["moment"].add_(parameter.grad)
            state["rows"].add_(1)
            parameter.sub_(state["moment"])


def build(seed: int) -> tuple[nn.Module, RowWise]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 5, bias=False)
    fully_shard(model)
    return model, RowWise(model.parameters())


def train(model: nn.Module, optimizer: RowWise) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_shards_rows_and_counts(tmp_path: pathlib.Path) -> None:
    model, optimizer = build(1)
    train(model, optimizer)
    Process(model=model, optimizer=optimizer).save(tmp_path / "s")
    other, others = build(2)
    (parameter,) = other.parameters()
    assert isinstance(parameter, DTensor)
    address = parameter.to_local().data_ptr()
    Process(model=other, optimizer=others).restore(tmp_path / "s")
    assert parameter.to_local().data_ptr() == address, "filled in place"
    (wanted,), (found,) = optimizer.state.values(), others.state.values()
    assert found["count"] == 1
    for key in ("moment", "rows"):
        assert isinstance(found[key], DTensor) and found[key].placements == wanted[key].placements
        assert torch.equal(found[key].to_local(), wanted[key].to_local())
    for pair in ((model, optimizer), (other, others)):
        train(*pair)
    (mine,) = model.parameters()
    assert isinstance(mine, DTensor) and torch.equal(mine.to_local(), parameter.to_local())
