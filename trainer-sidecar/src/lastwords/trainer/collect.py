"""
Lists the state of this rank: chunks with their live tensors, cached, and checked at each boundary.

Addresses stay the same over steps; they change when an optimizer's first step makes its state, with `load_state_dict`
and with `module.double()`. The check compares identities and addresses, the list is made anew only on a mismatch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from lastwords.protocol import chunks as chunks_
from lastwords.protocol.chunks import Chunk
from lastwords.trainer import hoststate
from lastwords.trainer.parts import Parts, StateError

EXTRA_STATE = "_extra_state"


@dataclasses.dataclass(frozen=True)
class Live:
    """A chunk and the memory of this process that holds it."""

    chunk: Chunk
    tensor: torch.Tensor
    """What the script holds; its version counter tells of changes."""
    local: torch.Tensor
    """The box itself, as a plain tensor without gradient."""


@dataclasses.dataclass
class State:
    """One listing. `stable`: parameters and optimizer state. `volatile`: buffers, which change in forward."""

    stable: list[Live] = dataclasses.field(default_factory=list)
    volatile: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """`get_extra_state()` of modules, by name."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """A second name of a tensor (tied weights) -> its first name."""
    empty: set[str] = dataclasses.field(default_factory=set)
    """Names of sharded tensors of which this rank holds no element."""
    parameter_names: dict[int, str] = dataclasses.field(default_factory=dict)
    """id(parameter) -> name, for optimizer state."""
    parameters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Name -> parameter, those of which this rank has an empty shard too."""
    optimizer_values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Optimizer state that is no tensor: `<part>.state.<parameter>.<key>` -> value."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The layout: sorted, without empty chunks."""
        return tuple(sorted(live.chunk for live in self.stable))

    @functools.cached_property
    def listing(self) -> str:
        """Digest of the names of parameters and buffers: equal where two ranks hold (shards of) the same ones."""
        names = sorted({*self.parameters, *self.aliases, *self.volatile, *self.extra})
        return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()

    def versions(self) -> tuple[int, ...]:
        """Version counters of all stable tensors."""
        return tuple(live.tensor._version for live in self.stable)


class Collector:
    """Keeps the newest listing and knows when it is out of date."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known_parameters: dict[int, str] = {}
        self._checks: list[tuple[torch.Tensor, int, int]] = []
        self._sharded: list[tuple[torch.Tensor, int, int]] = []
        self._groups: list[tuple[Any, list[int]]] = []
        self._modules: list[tuple[nn.Module, int, int, int]] = []
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        self._optimizer_slots: list[tuple[Any, Any, Any, int]] = []
        self.state = State()
        self.rebuild()
        self.born = Born.of(parts, self.state)

    def refresh(self) -> bool:
        """Bring the listing up to date; True when the layout (names, boxes, types) is another one now."""
        if self._valid():
            return False
        before = self.state.chunks
        self.rebuild()
        return self.state.chunks != before

    def rebuild(self) -> None:
        """List everything. Raises StateError for what cannot be saved."""
        self.state = State()
        seen: dict[tuple[Any, ...], str] = {}
        self._slots, self._modules, self._optimizer_slots, self._groups = [], [], [], []
        for part, module in self._parts.modules.items():
            self._list_module(part, module, seen)
        for part, optimizer in self._parts.optimizers.items():
            self._list_optimizer(part, optimizer, seen)
        self._known_parameters = self.state.parameter_names
        plain = [live.tensor for live in self.state.stable if not is_sharded(live.tensor)]
        plain += self.state.volatile.values()
        self._checks = [(tensor, tensor.data_ptr(), tensor.numel()) for tensor in plain]
        sharded = [live for live in self.state.stable if is_sharded(live.tensor)]
        self._sharded = [(live.tensor, live.local.data_ptr(), live.local.numel()) for live in sharded]

    # -- listing ----------------------------------------------------------------------------------

    def _list_module(self, part: str, module: nn.Module, seen: dict[tuple[Any, ...], str]) -> None:
        for name, value in module.state_dict(keep_vars=True).items():
            full = f"{part}.{name}"
            if name.rpartition(".")[2] == EXTRA_STATE:
                self.state.extra[full] = value
            elif not isinstance(value, torch.Tensor):
                kind = type(value)
                raise StateError(f"{full} is a {kind.__module__}.{kind.__qualname__} in a state_dict, not a tensor")
            elif isinstance(value, nn.Parameter):
                self._name(full, value)
                self._add_stable(full, value, seen)
            elif value.numel():
                self._add_volatile(full, value, seen)
        for inner in module.modules():
            self._modules.append((inner, len(inner._parameters), len(inner._buffers), len(inner._modules)))
            for table in (inner._parameters, inner._buffers):
                self._slots.extend((table, name, value) for name, value in table.items())

    def _list_optimizer(self, part: str, optimizer: Any, seen: dict[tuple[Any, ...], str]) -> None:
        self._groups.append((optimizer, [len(group["params"]) for group in optimizer.param_groups]))
        holder = state_holder(optimizer)
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self._name_parameter(part, parameter, f"{group_index}.{index}", seen)
                slots = holder.state.get(parameter, {})
                # Asked by key again at each check: load_state_dict installs new dicts.
                self._optimizer_slots.append((holder, parameter, dict(slots), len(slots)))
                for key, value in slots.items():
                    full = f"{part}.state.{name}.{key}"
                    if not isinstance(key, str) or "." in key:
                        raise StateError(f"{full}: the name of an optimizer's state must be a text without dots")
                    if isinstance(value, torch.Tensor):
                        self._add_stable(full, value, seen)
                    else:
                        self.state.optimizer_values[full] = value

    def _name_parameter(self, part: str, parameter: Any, place: str, seen: dict[tuple[Any, ...], str]) -> str:
        known = self.state.parameter_names.get(id(parameter))
        if known is not None:
            return known
        if id(parameter) in self._known_parameters and not self._known_parameters[id(parameter)].startswith(f"{part}."):
            raise StateError(
                f"{part} still holds {self._known_parameters[id(parameter)]}, which is no longer in the model "
                "(was it replaced with assign=True?): its updates would go nowhere. "
                "Make the optimizer when the model is complete"
            )
        # A parameter of no registered module: kept under the optimizer's name.
        name = f"{part}.params.{place}"
        self._name(name, parameter)
        self._add_stable(name, parameter, seen)
        return name

    def _name(self, name: str, parameter: Any) -> None:
        if id(parameter) not in self.state.parameter_names:
            self.state.parameter_names[id(parameter)] = name
            self.state.parameters[name] = parameter

    def _add_stable(self, name: str, tensor: torch.Tensor, seen: dict[tuple[Any, ...], str]) -> None:
        found = _chunks_of(name, tensor)
        if not found and tensor.numel():
            self.state.empty.add(name)
        for live in found:
            if self._alias(name, live.local, seen):
                self.state.aliases[name] = seen[_identity(live.local)]
            else:
                self.state.stable.append(live)

    def _add_volatile(self, name: str, tensor: torch.Tensor, seen: dict[tuple[Any, ...], str]) -> None:
        if is_sharded(tensor):
            tensor = _whole_buffer(name, tensor)
        _check_plain(name, tensor)
        if self._alias(name, tensor.detach(), seen):
            self.state.aliases[name] = seen[_identity(tensor)]
        else:
            self.state.volatile[name] = tensor

    def _alias(self, name: str, local: torch.Tensor, seen: dict[tuple[Any, ...], str]) -> bool:
        return seen.setdefault(_identity(local), name) != name

    # -- checking ---------------------------------------------------------------------------------

    def _valid(self) -> bool:
        for tensor, address, count in self._checks:
            if tensor.data_ptr() != address or tensor.numel() != count:
                return False
        if self._sharded and not self._same_shards():
            return False
        for optimizer, counts in self._groups:
            if [len(group["params"]) for group in optimizer.param_groups] != counts:
                return False
        for module, parameters, buffers, modules in self._modules:
            if (len(module._parameters), len(module._buffers), len(module._modules)) != (parameters, buffers, modules):
                return False
        for table, name, value in self._slots:
            if table.get(name) is not value:
                return False
        return all(self._same_slots(*row) for row in self._optimizer_slots)

    @torch.no_grad()
    def _same_shards(self) -> bool:
        """The wrapper of a shard has no address of its own."""
        for tensor, address, count in self._sharded:
            local = cast(Any, tensor).to_local()
            if local.data_ptr() != address or local.numel() != count:
                return False
        return True

    @staticmethod
    def _same_slots(optimizer: Any, parameter: Any, slots: dict[str, Any], count: int) -> bool:
        now = optimizer.state.get(parameter, None)
        if now is None:
            return not count
        if len(now) != count:
            return False
        for key, value in slots.items():
            new = now.get(key)
            if new is not value and (isinstance(value, torch.Tensor) or isinstance(new, torch.Tensor)):
                return False
        return True

    def extra_state(self) -> dict[str, Any]:
        """`get_extra_state()` of now of the modules that have one."""
        found: dict[str, Any] = {}
        if not self.state.extra:
            return found
        for part, module in self._parts.modules.items():
            for name, inner in module.named_modules():
                full = ".".join(word for word in (part, name, EXTRA_STATE) if word)
                if full in self.state.extra:
                    found[full] = inner.get_extra_state()
        return found

    def load_extra_state(self, saved: dict[str, Any]) -> None:
        """Give the modules back what `extra_state` returned."""
        for part, module in self._parts.modules.items():
            for name, inner in module.named_modules():
                full = ".".join(word for word in (part, name, EXTRA_STATE) if word)
                if full in saved:
                    inner.set_extra_state(saved[full])

    def optimizer_values(self) -> dict[str, Any]:
        """Values of now of the optimizer state that is no tensor (they change without a new listing)."""
        found: dict[str, Any] = {}
        if not self.state.optimizer_values:
            return found
        for part, state, name, parameter, _ in parameters_by_name(self._parts, self.state):
            for key, value in state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    found[f"{part}.state.{name}.{key}"] = value
        return found


@dataclasses.dataclass(frozen=True)
class Born:
    """What the script had built when the Checkpointer was made, before anything was restored."""

    groups: dict[str, int]
    """Optimizer part -> number of its parameter groups."""
    trainable: dict[str, bool]
    """Parameter -> `requires_grad`."""

    @classmethod
    def of(cls, parts: Parts, state: State) -> Born:
        """Of now."""
        groups = {name: len(optimizer.param_groups) for name, optimizer in parts.optimizers.items()}
        return cls(groups, {name: parameter.requires_grad for name, parameter in state.parameters.items()})


def parameters_by_name(parts: Parts, state: State) -> Iterator[tuple[str, Any, str, Any, dict[str, Any]]]:
    """(optimizer part, its state, parameter name, parameter, group) of everything that this rank optimises."""
    for part, optimizer in parts.optimizers.items():
        holder = state_holder(optimizer)
        for group in holder.param_groups:
            for parameter in group["params"]:
                yield part, holder.state, state.parameter_names[id(parameter)], parameter, group


def state_holder(optimizer: Any) -> Any:
    """The optimizer that has the state: ZeroRedundancyOptimizer has it, for its share of the parameters, in `optim`."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim
    return optimizer


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return ("empty", id(tensor))
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))


def _chunks_of(name: str, tensor: torch.Tensor) -> list[Live]:
    """The boxes of `tensor` that this process holds; none of an empty one."""
    if not is_sharded(tensor):
        _check_plain(name, tensor)
        if not tensor.numel():
            return []
        local = tensor.detach()
        return [Live(chunks_.whole(name, _dtype(name, tensor), tuple(tensor.shape)), tensor, local)]
    with torch.no_grad():
        local = cast(Any, tensor).to_local().detach()
    found = []
    for box in cast(Any, tensor).__create_chunk_list__():
        offsets, sizes = tuple(box.offsets), tuple(box.sizes)
        if tuple(local.shape) != sizes and (local.numel() or 0 not in sizes):
            raise StateError(
                f"{name} is {list(tensor.shape)} and cut into shards; torch says that this rank's shard is "
                f"{list(sizes)} at {list(offsets)}, but it is {list(local.shape)}. This happens where a dimension is "
                "cut twice and not divisible (fully_shard on a tensor-parallel module): make it divisible by the "
                "product of both cuts"
            )
        if local.numel():
            found.append(Live(Chunk(name, offsets, sizes, tuple(tensor.shape), _dtype(name, tensor)), tensor, local))
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """
    Whether it is a DTensor, or another tensor made of shards that describes itself as torch's checkpoints want it:
    `__create_chunk_list__` (what torch.distributed.checkpoint calls CheckpointableTensor) and `to_local`.
    """
    return hasattr(tensor, "__create_chunk_list__")


@torch.no_grad()
def _whole_buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = cast(Any, tensor).to_local().detach()
    if tuple(local.shape) != tuple(tensor.shape):
        raise StateError(
            f"{name} is a buffer cut into shards, which cannot be kept: each rank keeps its own buffers whole, since "
            "they may differ. Make it a replicated buffer, or a parameter without gradient"
        )
    return local


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        kind = type(tensor)
        raise StateError(f"{name} is a {kind.__module__}.{kind.__qualname__}: tensor subclasses cannot be saved yet")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(f"{name} is a {tensor.layout} tensor: only dense ones can be saved")
    if tensor.device.type == "meta":
        raise StateError(f"{name} has no memory yet (device meta): make the Checkpointer after the model is complete")
    _dtype(name, tensor)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    try:
        return hoststate.dtype_name(tensor.dtype)
    except KeyError:
        raise StateError(f"{name} is of {tensor.dtype}, which safetensors files do not have") from None
