"""
A training loop that saves every few steps in one of several ways and writes how long each part of a step took.

One JSON line per step: {"step", "seconds", "stall_seconds", "saves"}. A stall is what the loop waits for the save:
the save call itself, and whatever must be over before the next update.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Nothing:
    """No saves: what a step costs by itself."""

    def before_update(self) -> None:
        return

    def after_update(self, step: int, saves: bool) -> None:
        return

    def end(self) -> None:
        return


class TorchSave(Nothing):
    """`torch.save` by rank 0, then rename; the others wait at the barrier."""

    def __init__(self, state: Callable[[], dict[str, Any]], folder: pathlib.Path) -> None:
        self.state, self.folder = state, folder

    def after_update(self, step: int, saves: bool) -> None:
        if not saves:
            return
        if dist.get_rank() == 0:
            torch.save(self.state(), self.folder / "new.pt")
            os.replace(self.folder / "new.pt", self.folder / "newest.pt")
        dist.barrier()


class DcpSave(TorchSave):
    """`torch.distributed.checkpoint.save`."""

    def after_update(self, step: int, saves: bool) -> None:
        if saves:
            dcp.save(self.state(), checkpoint_id=self.folder / f"dcp-{step}")


class DcpAsyncSave(TorchSave):
    """`torch.distributed.checkpoint.async_save` in its own process group; the next one waits for the last."""

    def __init__(self, state: Callable[[], dict[str, Any]], folder: pathlib.Path) -> None:
        super().__init__(state, folder)
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def after_update(self, step: int, saves: bool) -> None:
        if not saves:
            return
        self.end()
        self.future = dcp.async_save(self.state(), checkpoint_id=self.folder / f"dcp-{step}", process_group=self.group)

    def end(self) -> None:
        if self.future is not None:
            self.future.result()


class Lastwords(Nothing):
    """The Checkpointer: the copy runs beside the next forward and backward, `wait` stands before the update."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from lastwords import Checkpointer

        self.checkpointer = Checkpointer(model=model, optimizer=optimizer)
        self.checkpointer.restore()

    def before_update(self) -> None:
        self.checkpointer.wait()

    def after_update(self, step: int, saves: bool) -> None:
        self.checkpointer.step_done()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["none", "torch.save", "dcp.save", "dcp.async_save", "lastwords"])
    parser.add_argument("--state-mb", type=float, default=50)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not dist.is_initialized():
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    width = int((arguments.state_mb * 1e6 / 12 / 8) ** 0.5)
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(arguments.batch, width)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    saver: Nothing = {
        "none": lambda: Nothing(),
        "torch.save": lambda: TorchSave(state, arguments.folder),
        "dcp.save": lambda: DcpSave(state, arguments.folder),
        "dcp.async_save": lambda: DcpAsyncSave(state, arguments.folder),
        "lastwords": lambda: Lastwords(model, optimizer),
    }[arguments.mode]()
    rows = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        waiting = time.perf_counter()
        saver.before_update()
        waited = time.perf_counter()
        optimizer.step()
        saves = (step + 1) % arguments.save_every == 0
        updated = time.perf_counter()
        saver.after_update(step + 1, saves)
        ended = time.perf_counter()
        if rows and rows[-1]["saves"]:
            rows[-1]["stall_seconds"] += waited - waiting
        rows.append({"step": step + 1, "seconds": ended - began, "saves": saves, "stall_seconds": ended - updated})
    began = time.perf_counter()
    saver.end()
    if dist.get_rank() == 0:
        result = {"rows": rows, "drain_seconds": time.perf_counter() - began, "width": width}
        (arguments.folder / f"result-{arguments.mode}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
