"""
A DDP training script that runs under `torchrun` (its own torch.save every 10 steps) and under `lastwords run`.

Every rank appends {"event", "time", "rank", "pid", ...} to its log, so that the driver can tell the phases.
"""

from __future__ import annotations

import json
import os
import time

BEGAN = time.time()

import argparse  # noqa: E402  (the time before the imports is what is measured)
import pathlib  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["torch", "lastwords"], required=True)
    parser.add_argument("--state-mb", type=float, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    log = (arguments.folder / f"events-{rank}.jsonl").open("a", buffering=1)

    def note(event: str, **more: Any) -> None:
        log.write(json.dumps({"event": event, "time": time.time(), "rank": rank, "pid": os.getpid(), **more}) + "\n")

    log.write(json.dumps({"event": "began", "time": BEGAN, "rank": rank, "pid": os.getpid()}) + "\n")
    note("imported")
    dist.init_process_group("gloo")
    note("group")
    torch.manual_seed(1)
    # AdamW keeps two values beside each parameter: 12 bytes of state per float32 parameter
    width = int((arguments.state_mb * 1e6 / 12 / 4) ** 0.5)
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    note("model")

    def train_one_step(step: int) -> None:
        time.sleep(0.05)  # as beside an accelerator: the processors are not busy all the time
        generator = torch.Generator().manual_seed(step * 100 + rank)
        loss = ddp(torch.randn(4, width, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if arguments.mode == "lastwords":
        from lastwords import Checkpointer

        checkpointer = Checkpointer(model=model, optimizer=optimizer)
        for step in checkpointer.steps(arguments.steps):
            if step == checkpointer.restored_step:
                note("restored", step=step)
            train_one_step(step)
            note("step", step=step)
    else:
        path = arguments.folder / "newest.pt"
        start = 0
        if path.exists():
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start = saved["step"]
        note("restored", step=start)
        for step in range(start, arguments.steps):
            train_one_step(step)
            note("step", step=step)
            if (step + 1) % 10 == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)
            if (step + 1) % 10 == 0:
                dist.barrier()
    note("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
