"""What the script gave to the Checkpointer, sorted by kind and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lastwords.trainer import loaders


class StateError(TypeError):
    """State that cannot be saved or restored; the text names it and says what to do."""


@dataclasses.dataclass
class Parts:
    """Parts by name; a list gives `name.0`, `name.1` and so on."""

    modules: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, Any] = dataclasses.field(default_factory=dict)
    common: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Schedulers and gradient scalers: equal on all ranks."""
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Everything else with state_dict and load_state_dict; may differ between ranks."""
    loaders: dict[str, loaders.Position] = dataclasses.field(default_factory=dict)
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


def sort(given: Mapping[str, Any]) -> Parts:
    """Raises StateError with the name of a part that cannot be kept."""
    result = Parts(given=dict(given))
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and not hasattr(value, "state_dict"):
            for index, item in enumerate(value):
                _add(result, f"{name}.{index}", item)
        else:
            _add(result, name, value)
    return result


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile, so that names do not depend on them."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _add(parts: Parts, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, nn.Module):
        parts.modules[name] = unwrap(value)
    elif isinstance(value, torch.optim.Optimizer) or _looks_like_optimizer(value):
        parts.optimizers[name] = value
    elif isinstance(value, DataLoader) and not _has_state(value):
        parts.loaders[name] = loaders.track(value)
    elif _is_common(value):
        parts.common[name] = value
    elif _has_state(value):
        parts.objects[name] = value
    else:
        kind = type(value)
        raise StateError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}: the Checkpointer keeps modules, optimizers, "
            "schedulers, data loaders and objects with state_dict and load_state_dict. "
            "Give it those two methods, or leave it out"
        )


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _looks_like_optimizer(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("param_groups", "state", "step"))


def _is_common(value: Any) -> bool:
    kinds: tuple[type, ...] = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return _has_state(value) and isinstance(value, kinds)
