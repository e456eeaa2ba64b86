"""
A small network under `fully_shard`, sharded over all ranks (`--mode fsdp`) or within each worker (`--mode hsdp`).

Writes the loss of each step to `<out>.rank<k>.jsonl` before the backward pass, and at the end the hash of the whole
state to `<out>`, like the reference model does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lastwords import Checkpointer

WIDTH = 32


def whole(tensor: torch.Tensor) -> bytes:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().contiguous().numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--mode", choices=("fsdp", "hsdp"), required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (world,) if args.mode == "fsdp" else (2, world // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 7))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(rank)

    checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    losses = os.open(f"{args.out}.rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for step in checkpointer.steps(args.steps):
        time.sleep(args.step_seconds)
        optimizer.zero_grad()
        loss = model(torch.randn(8, WIDTH)).square().mean()
        os.write(losses, (json.dumps({"step": step, "loss": loss.item().hex()}) + "\n").encode())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(tensor, nn.Parameter):
            total.update(name.encode() + whole(tensor))
            for key, value in sorted(optimizer.state[tensor].items()):
                total.update(key.encode() + whole(value))
    if rank == 0:
        args.out.write_text(json.dumps({"sha256": total.hexdigest(), "steps": checkpointer.step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
