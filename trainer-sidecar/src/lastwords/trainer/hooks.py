"""
Notices when an update begins, through the step hooks of the registered optimizers.

Optimizers nest (wrappers call an inner one's step), so a depth counter finds the outermost. An exception inside
`step` leaves the depth above zero; the boundary sets it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch


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
