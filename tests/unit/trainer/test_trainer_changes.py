"""What a script changes on its way: tied weights, parameter groups that are added, parameters that are unfrozen."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from lastwords.trainer.reading import WrongModelError
from tests.unit.trainer.one_process import Process


class Tied(nn.Module):
    """An output layer that may share the matrix of the input layer."""

    def __init__(self, seed: int, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x))
        return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


# --- tied weights -----------------------------------------------------------------------------------


def test_tied_weights_are_kept_once_and_come_back_tied(tmp_path: pathlib.Path) -> None:
    model = Tied(1, tied=True)
    optimizer = adam(model)
    train(model, optimizer)
    old = Process(model=model, optimizer=optimizer)
    old.save(tmp_path / "s")
    names = [chunk.name for chunk in old.collector.state.chunks]
    assert [name for name in names if "weight" in name and "state" not in name] == ["model.first.weight"]
    other = Tied(2, tied=True)
    Process(model=other, optimizer=adam(other)).restore(tmp_path / "s")
    assert other.last.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)


def test_tied_weights_may_be_two_tensors_later(tmp_path: pathlib.Path) -> None:
    """As in a pipeline, whose first and last stage have a copy each."""
    model = Tied(1, tied=True)
    optimizer = adam(model)
    train(model, optimizer)
    Process(model=model, optimizer=optimizer).save(tmp_path / "s")
    other = Tied(2, tied=False)
    others_optimizer = adam(other)
    Process(model=other, optimizer=others_optimizer).restore(tmp_path / "s")
    for layer in (other.first, other.last):
        assert torch.equal(layer.weight, model.first.weight)
        moments = others_optimizer.state[layer.weight]["exp_avg"]
        assert torch.equal(moments, optimizer.state[model.first.weight]["exp_avg"])
    assert others_optimizer.state[other.last.weight]["exp_avg"] is not others_optimizer.state[other.first.weight]


def test_two_equal_tensors_may_be_tied_later_but_not_two_different_ones(tmp_path: pathlib.Path) -> None:
    model = Tied(1, tied=False)
    Process(model=model).save(tmp_path / "different")
    with torch.no_grad():
        model.last.weight.copy_(model.first.weight)
    Process(model=model).save(tmp_path / "equal")
    other = Tied(2, tied=True)
    Process(model=other).restore(tmp_path / "equal")
    assert torch.equal(other.last.weight, model.first.weight)
    with pytest.raises(WrongModelError, match="are one tensor here .tied., but two different ones") as refused:
        Process(model=Tied(2, tied=True)).restore(tmp_path / "different")
    assert "model.last.weight" in str(refused.value) and "without tying" in str(refused.value)


# --- groups and frozen parameters --------------------------------------------------------------------


class Grown:
    """A training whose head is frozen at first and gets a parameter group of its own later."""

    def __init__(self, seed: int) -> None:
        self.model = Tied(seed, tied=False)
        self.model.last.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.first.parameters(), lr=0.1, momentum=0.9)
        self.process = Process(model=self.model, optimizer=self.optimizer)

    def grow(self) -> None:
        self.model.last.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model.last.parameters()), "lr": 0.01})


def test_an_added_group_and_unfrozen_parameters_come_back(tmp_path: pathlib.Path) -> None:
    """The step in which the script did it is not done again."""
    old = Grown(1)
    train(old.model, old.optimizer)
    assert old.process.collector.refresh()
    old.grow()
    assert not old.process.collector.refresh(), "nothing is held that was not held before"
    train(old.model, old.optimizer)
    assert old.process.collector.refresh(), "momentum of the new group"
    old.process.save(tmp_path / "s")
    new = Grown(2)
    restored = new.process.restore(tmp_path / "s")
    assert restored.thawed
    assert new.model.last.weight.requires_grad
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.1, 0.01]
    assert new.optimizer.param_groups[1]["params"] == [new.model.last.weight]
    for process in (old, new):
        train(process.model, process.optimizer)
    assert torch.equal(old.model.last.weight, new.model.last.weight)
    assert torch.equal(old.model.first.weight, new.model.first.weight)
    # A second restore: what the first one changed is still a change of what the script builds.
    new.process.save(tmp_path / "t")
    third = Grown(3)
    third.process.restore(tmp_path / "t")
    assert torch.equal(third.model.last.weight, new.model.last.weight)
    assert third.model.last.weight.requires_grad and len(third.optimizer.param_groups) == 2


def test_a_group_that_was_added_too_early_is_refused(tmp_path: pathlib.Path) -> None:
    old = Grown(1)
    train(old.model, old.optimizer)
    old.process.save(tmp_path / "s")
    new = Grown(2)
    new.grow()
    with pytest.raises(WrongModelError, match="has 2 parameter groups here and 1 in the saved state") as refused:
        new.process.restore(tmp_path / "s")
    assert "in that step only" in str(refused.value)


def test_a_group_with_parameters_that_are_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    old = Grown(1)
    old.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    old.process.save(tmp_path / "s")
    with pytest.raises(WrongModelError, match="optimizer.params.1.0, which are not in the model here"):
        Grown(2).process.restore(tmp_path / "s")


def test_a_group_of_the_script_itself_that_is_missing_is_refused(tmp_path: pathlib.Path) -> None:
    model = Tied(1, tied=False)
    groups = [{"params": list(layer.parameters())} for layer in (model.first, model.last)]
    Process(model=model, optimizer=torch.optim.SGD(groups, lr=0.1)).save(tmp_path / "s")
    other = Tied(1, tied=False)
    with pytest.raises(WrongModelError, match="Build the optimizer with the same groups"):
        Process(model=other, optimizer=adam(other)).restore(tmp_path / "s")
