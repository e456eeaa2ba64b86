"""O-36, O-41: calls that are stuck cost their own thread and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from lastwords.agent.offload import Offload
from lastwords.storage.base import StorageError


async def test_results_and_errors_come_back() -> None:
    offload = Offload("test")
    assert await offload.run(lambda: 7, 5.0) == 7
    with pytest.raises(KeyError):
        await offload.run(lambda: {}["x"], 5.0)
    assert offload.abandoned == 0


async def test_O_36_a_stuck_call_passes_its_deadline_and_the_next_one_gets_a_new_thread() -> None:
    offload, release = Offload("test", threads=1), threading.Event()
    try:
        with pytest.raises(StorageError) as caught:
            await offload.run(release.wait, 0.05, "the store")
        assert caught.value.kind == "stalled"
        assert "the store did not answer" in str(caught.value)
        assert offload.abandoned == 1
        assert await offload.run(lambda: "well", 5.0) == "well"
    finally:
        release.set()
    await back(offload)


async def test_O_41_the_number_of_stuck_threads_is_bounded_and_they_may_come_back() -> None:
    offload, release = Offload("test", most_abandoned=2), threading.Event()
    for _ in range(2):
        with pytest.raises(StorageError):
            await offload.run(release.wait, 0.01)
    with pytest.raises(StorageError, match="2 calls are stuck"):
        await offload.run(lambda: 1, 5.0)
    release.set()
    await back(offload)
    assert await offload.run(lambda: 1, 5.0) == 1


async def test_the_loop_is_never_blocked() -> None:
    offload, release = Offload("test"), threading.Event()
    call = asyncio.create_task(offload.run(release.wait, 30.0))
    began = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - began < 1.0
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert offload.abandoned == 1
    release.set()
    await back(offload)


async def back(offload: Offload) -> None:
    """Until no thread is left behind."""
    deadline = time.monotonic() + 10
    while offload.abandoned:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
