"""
The model of every test of equality: a plain user script that has all the state a restart can lose.

BatchNorm and dropout; AdamW with a scheduler stepped after the update, and SGD with momentum beside it; an EMA of the
model; gradient accumulation; every 7th step updates nothing; a shuffled loader with processes of its own. Two runs
with the same arguments and world size write the same losses and end in the same bytes, however often they were
interrupted. CPU only. Under plain python it runs without any protection. With `--shard` each rank holds a part of every
tensor (FSDP2).

`<out>.rank<k>.jsonl` gets one line per step, {"step", "loss"} with the loss as hexadecimal float; a step that was done
again after a restart has two, which must be equal. At the end rank 0 writes `<out>`: {"sha256", "ranks", "steps",
"world_size"}; BatchNorm's buffers differ between ranks, so `ranks` has the hash of each.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import pathlib
import time
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lastwords import Checkpointer

FEATURES, CLASSES = 32, 10
SKIP_EVERY = 7


class Waves(Dataset[tuple[Tensor, int]]):
    """Noise-free samples made from their index alone, so that loader processes need no seed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.grid = torch.arange(1, FEATURES + 1) / FEATURES

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sin(self.grid * (index + 1)), (index * 7919) % CLASSES


class Network(nn.Module):
    """Two hidden layers; nearly all of the state is in the `width` × `width` matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (FEATURES, width):
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float, buffers: bool) -> None:
    for average, current in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(current, 1 - decay)
    for average, current in zip(ema.buffers(), model.buffers(), strict=True) if buffers else ():
        average.copy_(current)


@contextlib.contextmanager
def gradients_kept_here(model: nn.Module, here: bool) -> Iterator[None]:
    """Whether this batch's gradients are only added up on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not here)
    with model.no_sync() if here and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
        yield


def endless(loader: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Batches of epoch after epoch. Asks for the first only when it is needed, which is after the restore."""
    while True:
        yield from loader


def digest(modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> bytes:
    """sha256 over names and bytes of everything the training has learned."""
    total = hashlib.sha256()

    def add(name: str, value: object) -> None:
        total.update(f"{name}\n".encode())
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
            total.update(value.detach().cpu().contiguous().numpy().data)
        else:
            total.update(f"{value!r}\n".encode())

    for kind, module in sorted(modules.items()):
        for name, tensor in sorted(module.state_dict().items()):
            add(f"{kind}.{name}", tensor)
    for kind, optimizer in sorted(optimizers.items()):
        state = optimizer.state_dict()
        for index, slots in sorted(state["state"].items()):
            for name, value in sorted(slots.items()):
                add(f"{kind}.{index}.{name}", value)
        for index, group in enumerate(state["param_groups"]):
            add(f"{kind}.{index}.lr", float(group["lr"]).hex())
    return total.digest()


def digests_of_all_ranks(own: bytes, world_size: int) -> list[str]:
    """In rank order, on every rank."""
    if world_size == 1:
        return [own.hex()]
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return [row.numpy().tobytes().hex() for row in gathered]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the reference model.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule-steps", type=int, help="period of the learning rate; default: --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result; losses go to <out>.rank<k>.jsonl")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--samples", type=int, default=200, help="size of the data set: samples per epoch and rank")
    parser.add_argument("--width", type=int, default=64, help="3700 makes a state of about 220 MB")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--shard", action="store_true", help="cut the state over all ranks (FSDP2) instead of DDP")
    parser.add_argument(
        "--foretold",
        action="store_true",
        help="the EMA leaves BatchNorm's buffers alone: nothing of a rank alone changes after its last gradient",
    )
    parser.add_argument("--loader-workers", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="makes each step this much longer")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)  # one order of summation on every machine
    torch.use_deterministic_algorithms(True)
    if world_size > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(args.seed)
    net = Network(args.width)
    ema = copy.deepcopy(net).requires_grad_(False)
    model: nn.Module = net
    if args.shard:
        mesh = init_device_mesh("cpu", (world_size,))
        for module in (net, ema):
            fully_shard(module, mesh=mesh)
    elif world_size > 1:
        # DDP regroups its buckets after the first step of a process, and with more than two ranks the sums then round
        # differently: a restarted run could not be bit-equal. find_unused_parameters keeps the buckets as they are; it
        # warns once, which TORCH_CPP_LOG_LEVEL=ERROR silences.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*broadcast_buffers")
        model = DistributedDataParallel(net, find_unused_parameters=True, broadcast_buffers=False)
    opt = torch.optim.AdamW(net.body.parameters(), lr=1e-3)
    head_opt = torch.optim.SGD(net.head.parameters(), lr=1e-2, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=max(args.schedule_steps or args.steps, 1))

    shuffle = torch.Generator().manual_seed(args.seed + rank)
    loader = DataLoader(
        Waves(args.samples),
        batch_size=args.batch_size,
        shuffle=True,
        generator=shuffle,
        num_workers=args.loader_workers,
        drop_last=True,
    )
    torch.manual_seed(args.seed * 1000 + rank)  # dropout differs between ranks

    ckpt = Checkpointer(model=net, ema=ema, optimizer=opt, head_optimizer=head_opt, scheduler=sched, loader=loader)
    batches = endless(ckpt.loader)
    losses = os.open(f"{args.out}.rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for step in ckpt.steps(args.steps):
        time.sleep(args.step_seconds)
        net.zero_grad()
        total = 0.0
        for part in range(args.accumulate):
            inputs, targets = next(batches)
            last = part == args.accumulate - 1
            with gradients_kept_here(model, not last):
                loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
                total += loss.item()
                if last:
                    # Before the last gradients leave: once other ranks have these, the job may go on after this step
                    # even if this rank dies in the next instant, and what it had not written yet is not written.
                    os.write(losses, (json.dumps({"step": step, "loss": total.hex()}) + "\n").encode())
                loss.backward()
        if step % SKIP_EVERY != SKIP_EVERY - 1:
            opt.step()
            head_opt.step()
            sched.step()
            update_ema(ema, net, decay=0.95, buffers=not args.foretold)
    os.close(losses)

    own = digest({"model": net, "ema": ema}, {"optimizer": opt, "head_optimizer": head_opt})
    ranks = digests_of_all_ranks(own, world_size)
    if rank == 0:
        result = {"sha256": ranks[0], "ranks": ranks, "steps": ckpt.step, "world_size": world_size}
        args.out.write_text(json.dumps(result) + "\n")
        print(f"sha256 {ranks[0]}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
