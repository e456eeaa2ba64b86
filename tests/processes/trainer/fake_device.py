"""
An accelerator for tests: work is queued and done by a thread, in order, while Python goes on.

The tensors are those of the CPU; only optimizers and "collectives" work through the queue.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lastwords.trainer import device


class FakeMark:
    """Set by the device's thread when it comes to it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.pass_by = self._event.set

    def reached(self) -> bool:
        return self._event.is_set()


class FakeDevice:
    """`device.Device` over a thread."""

    asynchronous = True

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def queue(self, work: Callable[[], Any]) -> None:
        """Do this after everything that was queued before."""
        self._queue.put(work)

    def mark(self) -> device.Mark:
        mark = FakeMark()
        self.queue(mark.pass_by)
        return mark

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def _run(self) -> None:
        while True:
            self._queue.get()()


class QueuedSGD(torch.optim.Optimizer):
    """Plain descent whose update takes place on the device: one parameter after the other, `between` in between."""

    def __init__(
        self, params: Iterable[torch.Tensor], fake: FakeDevice, lr: float, between: Callable[[], None]
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._fake = fake
        self._between = between

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        work = [(parameter.data, parameter.grad.clone()) for parameter in group["params"]]

        def update() -> None:
            for data, gradient in work:
                data.sub_(gradient, alpha=group["lr"])
                self._between()

        self._fake.queue(update)


def wait_for(path: pathlib.Path) -> None:
    """A collective that hangs, or an update that is stuck, until the file is there."""
    while not os.path.exists(path):
        time.sleep(0.005)
