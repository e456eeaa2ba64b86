"""O-42: no batch is repeated or skipped after a resume, whatever the moment, with and without loader processes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from lastwords.trainer import hoststate, loaders, randomness

STEPS = 23


class Noisy(Dataset[Any]):
    """Its number, and an augmentation from each generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1).item(), random.random(), float(np.random.rand())


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


def make(kind: str, workers: int) -> DataLoader[Any]:
    torch.manual_seed(3)
    random.seed(1)
    np.random.seed(2)
    data = Noisy()
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "drop_last": True}
    if kind == "own generator":
        return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(5), **options)
    if kind == "default generator":
        return DataLoader(data, shuffle=True, **options)
    if kind == "persistent workers":
        return DataLoader(data, shuffle=True, persistent_workers=workers > 0, **options)
    if kind == "distributed sampler":
        return DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0), **options)
    assert kind == "weighted sampler"
    return DataLoader(data, sampler=WeightedRandomSampler([1.0] * 40, 40), **options)


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def take(iterator: Iterator[Any]) -> list[Any]:
    # The number after the batch shows that the process's own random numbers go on as well.
    return [*(column.tolist() for column in next(iterator)), torch.rand(1).item()]


def kept(position: loaders.Position) -> str | Any:
    encoded = hoststate.encode_part("own", {"random": randomness.capture(), "loader": position.state()})
    return hoststate.decode(json.loads(encoded.text), encoded.table)


def resume(position: loaders.Position, state: Any) -> None:
    position.load(state["loader"])
    randomness.restore(state["random"])


KINDS = ["own generator", "default generator", "persistent workers", "distributed sampler", "weighted sampler"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_o_42_a_resumed_run_sees_the_same_batches(kind: str, workers: int) -> None:
    loader = make(kind, workers)
    position = loaders.track(loader)
    iterator = batches(loader)
    seen, states = [], []
    for _ in range(STEPS):
        states.append(kept(position))
        seen.append(take(iterator))
    if kind != "weighted sampler":
        first_epoch = sorted(index for row in seen[:10] for index in row[0])
        assert first_epoch == list(range(40))
    # odd moments: nothing consumed, within an epoch, its last batch, its end not yet noticed, the next one
    for step in (0, 1, 9, 10, 11, 17):
        loader = make(kind, workers)
        position = loaders.track(loader)
        iterator = batches(loader)
        resume(position, states[step])
        assert [take(iterator) for _ in range(step, STEPS)] == seen[step:], f"resumed at {step}"


def test_o_42_three_resumes_within_one_epoch() -> None:
    loader = make("own generator", 0)
    position = loaders.track(loader)
    iterator = batches(loader)
    undisturbed = [take(iterator) for _ in range(10)]
    seen: list[Any] = []
    state = None
    for upto in (3, 4, 8, 10):
        loader = make("own generator", 0)
        position = loaders.track(loader)
        if state is not None:
            resume(position, state)
        iterator = batches(loader)
        while len(seen) < upto:
            seen.append(take(iterator))
        state = kept(position)
    assert seen == undisturbed


def test_an_iterator_made_before_the_restore_goes_on_too() -> None:
    loader = make("default generator", 0)
    position = loaders.track(loader)
    iterator = iter(loader)
    seen = [take(iterator) for _ in range(4)]
    state = kept(position)
    seen += [take(iterator) for _ in range(3)]

    loader = make("default generator", 0)
    position = loaders.track(loader)
    iterator = iter(loader)
    resume(position, state)
    assert [take(iterator) for _ in range(3)] == seen[4:]


def test_an_epoch_left_with_break_is_over() -> None:
    def one(loader: DataLoader[Any]) -> list[Any]:
        for batch in loader:
            return [column.tolist() for column in batch]
        raise AssertionError

    loader = make("own generator", 0)
    position = loaders.track(loader)
    one(loader), one(loader)
    state = kept(position)
    assert state["loader"]["ended"] and state["loader"]["epoch"] == 1
    expected = one(loader)

    loader = make("own generator", 0)
    position = loaders.track(loader)
    resume(position, state)
    assert one(loader) == expected


def test_consumed_batches_are_not_loaded_again() -> None:
    loaded: list[int] = []

    class Counting(Noisy):
        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return index

    def fresh() -> tuple[DataLoader[Any], loaders.Position]:
        loader: DataLoader[Any] = DataLoader(Counting(), batch_size=4, shuffle=True)
        return loader, loaders.track(loader)

    loader, position = fresh()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = kept(position)
    loader, position = fresh()
    resume(position, state)
    loaded.clear()
    next(iter(loader))
    assert len(loaded) == 4


def test_an_iterable_data_set_reads_again_what_was_consumed() -> None:
    loader: DataLoader[Any] = DataLoader(Endless(), batch_size=4)
    position = loaders.track(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = kept(position)
    expected = next(iterator)
    loader = DataLoader(Endless(), batch_size=4)
    position = loaders.track(loader)
    resume(position, state)
    assert torch.equal(next(iter(loader)), expected)


def test_the_loader_stays_a_data_loader() -> None:
    loader = make("own generator", 0)
    loaders.track(loader)
    assert isinstance(loader, DataLoader) and len(loader) == 10 and len(loader.dataset) == 40  # type: ignore[arg-type]
    assert loaders.track(loader) is loaders.track(loader)
