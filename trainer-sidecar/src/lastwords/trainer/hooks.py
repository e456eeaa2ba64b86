"""
Notices when a backward pass and when an update begins, through hooks on parameters and optimizers.

Optimizers nest (wrappers call an inner one's step), so a depth counter finds the outermost. An exception inside
`step` leaves the depth above zero; the boundary sets it back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


class UpdateHooks:
    """Calls `before_update` before the outermost `step` of any of the optimizers."""

    def __init__(self, optimizers: Iterable[Any], before_update: Callable[[], None]) -> None:
        self._before_update = before_update
        self._depth = 0
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._pre)
                optimizer.register_step_post_hook(self._post)
            else:
                _wrap_step(optimizer, self)

    def reset(self) -> None:
        """A boundary: no optimizer is inside of its step."""
        self._depth = 0

    def enter(self) -> None:
        """An optimizer's step begins."""
        self._depth += 1
        if self._depth == 1:
            self._before_update()

    def leave(self) -> None:
        """An optimizer's step has ended without an exception."""
        self._depth = max(self._depth - 1, 0)

    def _pre(self, *_: Any) -> None:
        self.enter()

    def _post(self, *_: Any) -> None:
        self.leave()


class BackwardHooks:
    """
    Calls `at_backward` when the first gradient of a backward pass is there, and `at_last` when the last one is.

    Hooks on leaves run before the gradient is accumulated, hence before DistributedDataParallel can send it away: a
    pass with one parameter only is seen too, before any other rank has all it needs. Parameters that are unfrozen
    later are not watched; the pass is then noticed at one of the others, or not at all. The last one is known by its
    number in the same pass of the step before.

    torch's `register_multi_grad_hook(mode="any")` would say the same, but keeps an entry for every pass for ever; the
    private number of the pass is what it uses too.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], at_backward: Callable[[], None], at_last: Callable[[], None]
    ) -> None:
        self._at_backward = at_backward
        self._at_last = at_last
        self._pass = -1
        self._counts: list[int] = []
        """Gradients of each pass since the boundary."""
        self._usual: list[int] = []
        """The same of the step before."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._gradient)  # type: ignore[no-untyped-call]

    def watch_outputs(self, module: nn.Module) -> None:
        """
        For a module with parts under `fully_shard`: autograd never sees the shards, so its outputs are watched.

        Their gradients are the first of the pass, before any is reduced over the ranks.
        """
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(inner, fsdp.FSDPModule) for inner in module.modules()):
            module.register_forward_hook(lambda _module, _arguments, output: self._watch(output))

    def _watch(self, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                output.register_hook(self._gradient)  # type: ignore[no-untyped-call]
        elif isinstance(output, Mapping):
            self._watch(list(output.values()))
        elif isinstance(output, (list, tuple)):
            for item in output:
                self._watch(item)

    def reset(self) -> None:
        """A boundary."""
        self._usual, self._counts = self._counts, []

    def _gradient(self, _: torch.Tensor) -> None:
        number: int = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            self._counts.append(0)
            self._at_backward()
        elif not self._counts:
            return  # a boundary in the middle of a pass: nothing to count
        self._counts[-1] += 1
        index = len(self._counts) - 1
        if index < len(self._usual) and self._counts[index] == self._usual[index]:
            self._at_last()


def _wrap_step(optimizer: Any, hooks: UpdateHooks) -> None:
    """An optimizer that is not torch's has no hooks: its `step` is wrapped on the object."""
    original = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        hooks.enter()
        result = original(*args, **kwargs)
        hooks.leave()
        return result

    optimizer.step = step
