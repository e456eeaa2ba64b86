"""
One small network in the usual parallel layouts. Its whole state, gathered by torch itself, is what restores must equal.

Sizes are such that shards are uneven and some ranks hold nothing of some tensors. Run under gloo with 4 or 8 ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

WIDTH, INPUTS, CLASSES, BLOCKS = 12, 6, 5, 2
KINDS = ("ddp", "fsdp", "hsdp", "tp-dp", "tp-fsdp", "pp-tp-dp", "zero")


class Block(nn.Module):
    """What tensor parallelism cuts: `up` by rows, `down` by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    """The whole network, or one of two stages: each has its own blocks under their global numbers."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        numbers = range(BLOCKS) if stage is None else range(stage, stage + 1)
        if stage in (None, 0):
            self.stem = nn.Linear(INPUTS, WIDTH)
            self.scale = nn.Parameter(torch.rand(3))
        self.blocks = nn.ModuleDict({str(number): Block() for number in numbers})
        if stage in (None, 1):
            self.head = nn.Linear(WIDTH, CLASSES)
            self.frozen = nn.Parameter(torch.rand(CLASSES), requires_grad=False)
        for number in numbers:
            self.register_buffer(f"seen{number}", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "stem"):
            x = self.stem(x) * self.scale.mean()
        for number, block in self.blocks.items():
            getattr(self, f"seen{number}").add_(1)
            x = block(x)
        if hasattr(self, "head"):
            x = self.head(x) + self.frozen
        return x


@dataclasses.dataclass
class Parallel:
    """One rank's share of a layout. `update` is one forward, backward and step with the data of that step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[int], None]


def build(kind: str, seed: int) -> Parallel:
    """Raises KeyError for a kind that does not exist."""
    torch.manual_seed(seed)
    return _BUILDERS[kind]()


def state_of(parallel: Parallel) -> dict[str, Tensor]:
    """Parameters and optimizer state of this rank, under the names that the Checkpointer uses."""
    model, optimizer = parallel.model, parallel.optimizer
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {n: p for n, p in inner.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
    state = optimizer.optim.state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state
    moments = {
        f"optimizer.state.model.{name}.{key}": value
        for name, parameter in found.items()
        for key, value in state.get(parameter, {}).items()
    }
    return {f"model.{name}": parameter.detach() for name, parameter in found.items()} | moments


def full_state(parallel: Parallel) -> dict[str, Tensor]:
    """The state of all ranks, whole, put together by torch; on rank 0, empty elsewhere. A collective."""
    own = {name: _whole(tensor) for name, tensor in state_of(parallel).items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, every if dist.get_rank() == 0 else None)
    merged: dict[str, Tensor] = {}
    for part in every if dist.get_rank() == 0 else ():
        for name, tensor in part.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), name
    return dict(sorted(merged.items()))


def difference(parallel: Parallel, wanted: dict[str, Tensor]) -> str:
    """What of `wanted`, the whole state, this rank does not have as torch would cut it; and names that nobody has."""
    own = state_of(parallel)
    wrong = [name for name, tensor in own.items() if name not in wanted or not _same(tensor, wanted[name])]
    names: list[Any] = [own.keys()]
    if dist.is_initialized():
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, list(own))
    missing = sorted(wanted.keys() - set().union(*names))
    return f"wrong {wrong[:5]}, missing {missing[:5]}" if wrong or missing else ""


def _same(tensor: Any, whole: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return torch.equal(tensor, whole)
    if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return torch.equal(tensor.full_tensor(), whole)
    cut = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return torch.equal(tensor.to_local(), cut.to_local())


def _whole(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    copy: Tensor = whole.detach().clone()
    return copy


def optimizer_of(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    return torch.optim.AdamW(groups_of(parameters), lr=0.01)


def groups_of(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Matrices decay, vectors don't."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step: int, replica: int) -> Tensor:
    """Data of a step."""
    return torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(100 * step + replica))


# --- layouts ----------------------------------------------------------------------------------------


def _simple(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int) -> Parallel:
    def update(step: int) -> None:
        optimizer.zero_grad()
        model(batch(step, replica)).square().mean().backward()
        optimizer.step()

    return Parallel(model, optimizer, update)


def _single() -> Parallel:
    model = Net()
    return _simple(model, optimizer_of(model.parameters()), 0)


def _data_parallel() -> DistributedDataParallel:
    # Buckets stay as they are: a restored run could otherwise not be bit-equal (see the architecture).
    return DistributedDataParallel(Net(), find_unused_parameters=True)


@functools.cache
def mesh_of(*dimensions: tuple[str, int]) -> DeviceMesh:
    """Of all ranks; each one is made once, since process groups are dear."""
    names = tuple(name for name, _ in dimensions)
    return init_device_mesh("cpu", tuple(size for _, size in dimensions), mesh_dim_names=names)


def _ddp() -> Parallel:
    model = _data_parallel()
    return _simple(model, optimizer_of(model.parameters()), dist.get_rank())


def _zero() -> Parallel:
    model = _data_parallel()
    optimizer = ZeroRedundancyOptimizer(groups_of(model.parameters()), optimizer_class=torch.optim.AdamW, lr=0.01)  # type: ignore[no-untyped-call]
    return _simple(model, optimizer, dist.get_rank())


def _fsdp() -> Parallel:
    return _sharded(mesh_of(("shard", dist.get_world_size())))


def _hsdp() -> Parallel:
    return _sharded(mesh_of(("replica", 2), ("shard", dist.get_world_size() // 2)))


def _sharded(mesh: DeviceMesh) -> Parallel:
    model = Net()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _simple(model, optimizer_of(model.parameters()), dist.get_rank())


def _cut(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Data parallelism by hand, as DistributedDataParallel does not take sharded parameters."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(local, group=mesh.get_group())
            local.div_(mesh.size())


def _tp_dp() -> Parallel:
    mesh = mesh_of(("dp", dist.get_world_size() // 2), ("tp", 2))
    model = Net()
    _cut(model, mesh["tp"])
    optimizer = optimizer_of(model.parameters())

    def update(step: int) -> None:
        optimizer.zero_grad()
        model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        _average(model, mesh["dp"])
        optimizer.step()

    return Parallel(model, optimizer, update)


def _tp_fsdp() -> Parallel:
    mesh = mesh_of(("dp", dist.get_world_size() // 2), ("tp", 2))
    model = Net()
    _cut(model, mesh["tp"])
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _simple(model, optimizer_of(model.parameters()), mesh["dp"].get_local_rank())


def _pp_tp_dp() -> Parallel:
    mesh = mesh_of(("pp", 2), ("dp", dist.get_world_size() // 4), ("tp", 2))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(torch.initial_seed() + stage)
    model = Net(stage)
    _cut(model, mesh["tp"])
    optimizer = optimizer_of(model.parameters())
    other = mesh["pp"].mesh[1 - stage].item()

    def update(step: int) -> None:
        optimizer.zero_grad()
        if stage == 0:
            out = model(batch(step, mesh["dp"].get_local_rank()))
            dist.send(out.detach(), other)
            grad = torch.empty_like(out)
            dist.recv(grad, other)
            out.backward(grad)
        else:
            inner = torch.empty(4, WIDTH)
            dist.recv(inner, other)
            model(inner.requires_grad_()).square().mean().backward()
            assert inner.grad is not None
            dist.send(inner.grad, other)
        _average(model, mesh["dp"])
        optimizer.step()

    return Parallel(model, optimizer, update)


_BUILDERS: dict[str, Callable[[], Parallel]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp-dp": _tp_dp,
    "tp-fsdp": _tp_fsdp,
    "pp-tp-dp": _pp_tp_dp,
    "zero": _zero,
}
