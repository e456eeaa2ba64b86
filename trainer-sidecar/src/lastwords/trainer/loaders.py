"""
A plain DataLoader that can go on in the middle of an epoch.

Its position is (epoch, batches consumed, generator states when the epoch began). On restore the first iteration
draws the same order from the same states and skips the consumed batches in the *sampler*, without loading them; then
it sets the generators back, so that the process's random numbers go on as if nothing had happened. Batches that
loader processes have prepared but the script has not seen do not count as consumed.

Loader processes are seeded for each batch (from the epoch's states and the batch's number), so that augmentations
do not depend on which process makes a batch or on how many it made before. Random state that a data set keeps in
itself is not covered.
"""

from __future__ import annotations

import functools
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lastwords.trainer import randomness

log = logging.getLogger("lastwords")


class Position:
    """Where a loader is. Lives beside the loader; its state goes to the small record."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.epoch = 0
        """Epochs begun before the current one."""
        self.consumed = 0
        self.began: dict[str, Any] | None = None
        """Generator states when the epoch began; None before the first."""
        self.ended = True
        self.resuming = False
        """The next iteration goes on inside of the epoch."""
        self.restores = 0
        self.iterator: weakref.ref[Batches] | None = None

    def state(self) -> dict[str, Any]:
        """For the small record."""
        # An iterator that nobody holds any more was left with `break`: its epoch is over.
        alive = self.iterator is not None and self.iterator() is not None
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "began": self.began,
            "ended": self.ended or not (alive or self.resuming),
            "now": _generator_states(self._loader),
        }

    def load(self, state: dict[str, Any], *, reseed: tuple[int, int] | None = None) -> None:
        """Go on where `state` was. `reseed` (step, rank): the state is another rank's, take only its epoch."""
        self.epoch, self.consumed, self.began = state["epoch"], state["consumed"], state["began"]
        self.ended = state["ended"] or reseed is not None
        self.resuming = not self.ended
        self.restores += 1
        if reseed is None:
            _set_generator_states(self._loader, state["now"])
        else:
            for name, generator in _generators(self._loader).items():
                generator.manual_seed(randomness.stable_seed("loader", name, *reseed))

    def begin_epoch(self) -> int:
        """Note the generators' states, in front of everything the iterator draws. Returns the epoch's seed."""
        if self.began is not None:
            self.epoch += 1
        self.consumed = 0
        # An iterator with persistent workers is used again, and then draws no seed of its own.
        reused = getattr(self._loader, "_iterator", None) is not None
        generators = _generator_states(self._loader)
        self.began = {"process": randomness.capture(), "generators": generators, "reused": reused}
        self.ended = False
        self._set_sampler_epoch()
        return self.seed()

    def seed(self) -> int:
        """Seed of the current epoch: the same in a run that is resumed inside of it."""
        assert self.began is not None
        words: list[int | str | bytes] = [self.epoch, self.began["process"]["torch"].numpy().tobytes()]
        words += [state.numpy().tobytes() for state in self.began["generators"].values()]
        return randomness.stable_seed(*words)

    def resume_epoch(self) -> dict[str, Any]:
        """Put the generators to where the epoch began; returns the states to go back to."""
        assert self.began is not None
        now = {"process": randomness.capture(), "generators": _generator_states(self._loader)}
        self.set_states(self.began)
        self._set_sampler_epoch()
        self.resuming = False
        return now

    def set_states(self, states: dict[str, Any]) -> None:
        """Put all generators to `states` (`began`, or what `resume_epoch` returned)."""
        randomness.restore(states["process"])
        _set_generator_states(self._loader, states["generators"])

    def _set_sampler_epoch(self) -> None:
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)


class Batches(Iterator[Any]):
    """Iterator over one epoch that counts what the script takes."""

    def __init__(self, loader: Any, position: Position) -> None:
        self._loader = loader
        self._position = position
        self._inner: Any = None
        self._restores = position.restores
        self._open()

    def __next__(self) -> Any:
        if self._restores != self._position.restores:
            # Made before the restore: go on where the restored run was.
            self._restores = self._position.restores
            self._inner = None
            self._open()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._position.ended = True
            raise
        self._position.consumed += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _open(self) -> None:
        position, loader = self._position, self._loader
        position.iterator = weakref.ref(self)
        if not position.resuming:
            loader._lastwords_index.begin(position.begin_epoch(), 0)
            self._inner = loader._lastwords_open()
            return
        now = position.resume_epoch()
        try:
            skip_in_sampler = not isinstance(loader.dataset, IterableDataset)
            loader._lastwords_index.begin(position.seed(), position.consumed if skip_in_sampler else 0)
            if position.began and position.began["reused"]:
                # The new iterator draws a seed that the old one did not: once more back, before the order is drawn.
                loader._lastwords_index.rewind = functools.partial(position.set_states, position.began)
            self._inner = loader._lastwords_open()
            if loader._lastwords_index.order is not None:
                loader._lastwords_index.order.skip()
            if not skip_in_sampler:
                log.warning(
                    "lastwords: an iterable data set has no sampler: %d batches are read again", position.consumed
                )
                for _ in range(position.consumed):
                    next(self._inner, None)
        finally:
            position.set_states(now)


class Numbered(list[Any]):
    """Indices of one batch, with what a loader process needs to seed itself for it."""

    seed = 0


class Index:
    """In place of the loader's batch sampler: skips what was consumed, numbers the rest."""

    def __init__(self, inner: Any, numbered: bool) -> None:
        self.inner = inner
        self._numbered = numbered
        self._seed = 0
        self._skip = 0
        self.order: Order | None = None
        self.rewind: Callable[[], None] | None = None

    def begin(self, seed: int, skip: int) -> None:
        """Seed of the coming epoch, and how many batches of it are over."""
        self._seed, self._skip, self.rewind = seed, skip, None

    def __iter__(self) -> Iterator[Any]:
        self.order = Order(self.inner, self._seed if self._numbered else None, self._skip, self.rewind)
        return self.order

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class Order(Iterator[Any]):
    """The order of one epoch from batch `skip` on."""

    def __init__(self, inner: Any, seed: int | None, skip: int, rewind: Callable[[], None] | None) -> None:
        self._rewind = rewind
        self._iterator = iter(inner)
        self._seed = seed
        self._number = 0
        self._skip = skip

    def skip(self) -> None:
        """
        Leave out what was consumed.

        Not at construction: the loader draws a seed between making this iterator and asking for the first batch,
        and the sampler draws the order after that.
        """
        if self._rewind is not None:
            self._rewind()
            self._rewind = None
        while self._number < self._skip:
            self._number += 1
            next(self._iterator, None)

    def __next__(self) -> Any:
        self.skip()
        indices = next(self._iterator)
        if self._seed is not None:
            indices = Numbered(indices)
            indices.seed = randomness.stable_seed(self._seed, self._number)
        self._number += 1
        return indices


class SeededDataset:
    """In place of the loader's data set: seeds the loader process before it makes a batch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if isinstance(indices, Numbered) and get_worker_info() is not None:
            random.seed(indices.seed)
            np.random.seed(indices.seed % (1 << 32))
            torch.manual_seed(indices.seed)
        many = getattr(self.inner, "__getitems__", None)
        if many:
            found: list[Any] = many(list(indices))
            return found
        return [self.inner[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def _tracked_class(kind: type) -> type:
    """
    A subclass of the loader's own class. It must have that one base only: an object can change its class only to one
    of the same layout.
    """

    def open_inner(self: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = kind.__iter__(self)  # type: ignore[attr-defined]
        return iterator

    def iterate(self: Any) -> Iterator[Any]:
        return Batches(self, self._lastwords_position)

    members = {"__module__": kind.__module__, "__iter__": iterate, "_lastwords_open": open_inner}
    return type(kind.__name__, (kind,), members)


def track(loader: DataLoader[Any]) -> Position:
    """
    Make `loader` itself countable, so that a script may iterate over the object it already has.

    Its class becomes a subclass of what it was; sampler and data set are wrapped in place.
    """
    known = getattr(loader, "_lastwords_position", None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    position = Position(loader)
    batched = loader._auto_collation and not isinstance(loader.dataset, IterableDataset)
    name = "batch_sampler" if loader._auto_collation else "sampler"
    index = Index(getattr(loader, name), numbered=batched)
    # DataLoader's own __setattr__ refuses changes after construction; here they are wanted.
    object.__setattr__(loader, name, index)
    if batched:
        object.__setattr__(loader, "dataset", SeededDataset(loader.dataset))
    object.__setattr__(loader, "_lastwords_index", index)
    object.__setattr__(loader, "_lastwords_position", position)
    loader.__class__ = _tracked_class(type(loader))
    return position


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found: list[Any] = []
    for sampler in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        sampler = sampler.inner if isinstance(sampler, Index) else sampler
        if sampler is not None and all(sampler is not known for known in found):
            found.append(sampler)
    return found


def _generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    found: dict[str, torch.Generator] = {}
    owners = {"loader": loader, **{f"sampler{index}": s for index, s in enumerate(_samplers(loader))}}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found.values()):
            found[name] = generator
    return found


def _generator_states(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _generators(loader).items()}


def _set_generator_states(loader: DataLoader[Any], states: dict[str, torch.Tensor]) -> None:
    generators = _generators(loader)
    for name, state in states.items():
        if name in generators:
            generators[name].set_state(state)
