"""
Where tensors live, and in which order work on them takes place there.

On a CPU an operation is over when Python goes on. An accelerator works through a queue, and Python may be steps ahead
of it: whether a state is whole is then a question of the *device's* order. Marks are put into the queue and asked
later whether they have been reached; nothing here ever waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

log = logging.getLogger("lastwords")


class Mark(Protocol):
    """A place in the device's queue."""

    def reached(self) -> bool:
        """Whether everything before it has been done. Never blocks."""


class Device(Protocol):
    """What the library needs of the place where the state lives."""

    asynchronous: bool
    """Whether Python may be ahead of it."""

    def mark(self) -> Mark:
        """A mark behind all that the calling thread has queued for training so far."""

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Copies inside do not queue behind training's work, and are over at the end."""

    def pin(self, address: int, nbytes: int) -> None:
        """Copies will go into this host memory."""


class _Reached:
    def reached(self) -> bool:
        return True


class Cpu:
    """Everything is done as soon as it is asked for."""

    asynchronous = False
    _mark = _Reached()

    def mark(self) -> Mark:
        """Reached already."""
        return self._mark

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to arrange."""
        return contextlib.nullcontext()

    def pin(self, address: int, nbytes: int) -> None:
        """Nothing to do."""


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Cuda:
    """One CUDA device. Copies run on a stream of their own, so that a collective that hangs does not hold them up."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """An event on the current stream, which is where optimizers and collectives queue their work."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Event(event)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """On the side stream, waited for at the end."""
        with torch.cuda.stream(self._side):
            yield
        self._side.synchronize()

    def pin(self, address: int, nbytes: int) -> None:
        """Register the memory, so that copies into it neither allocate nor wait."""
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            log.warning("lastwords: snapshot memory could not be pinned (%s): copies will be slower", error)


def of(tensors: Iterable[torch.Tensor]) -> Device:
    """The device where the model's tensors are."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return Cuda(tensor.device)
    return Cpu()
