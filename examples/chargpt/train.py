"""
A small GPT learns to write Python, letter by letter, from the sources of Python's own standard library.

The two lines of Lastwords are marked. Everything else is what any PyTorch script with DistributedDataParallel looks
like, so it also runs as `python train.py` or under torchrun, then without protection:

    lastwords run --workers 2 --procs 2 -- python examples/chargpt/train.py --steps 200

`--shard` cuts weights and optimizer state over all ranks (FSDP2) instead of keeping them whole on each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import sysconfig

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lastwords import Checkpointer  # ← Lastwords, line 1

LETTERS = 128  # ASCII
CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits


def standard_library(megabytes: float = 2.0) -> Tensor:
    """The text to learn from: one number per letter."""
    text = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes().decode("ascii", "ignore").encode()
        if len(text) >= megabytes * 1e6:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def random_batch(text: Tensor, size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (size,)).tolist()
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def shard(model: CharGPT) -> CharGPT:
    """Weights and optimizer state of each block over all ranks; of the rest as well."""
    from torch.distributed.fsdp import fully_shard  # takes a moment, and only sharded runs need it

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All ranks' shards put together; a collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT on the standard library.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=12, help="rows per rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard", action="store_true", help="FSDP2: cut the model over all ranks")
    parser.add_argument("--out", type=pathlib.Path, help="write the weights' hash here, losses to OUT.rank<k>.jsonl")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")

    text = standard_library()
    torch.manual_seed(args.seed)
    model = CharGPT()
    parallel: nn.Module = model
    # find_unused_parameters: DDP otherwise regroups its buckets after the first step of a process, and sums over more
    # than two ranks then round differently. Training would not mind, but we want to compare bits after a restart.
    if world_size > 1:
        parallel = shard(model) if args.shard else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(args.steps, 1))
    torch.manual_seed(args.seed * 1000 + rank)  # every rank draws its own batches

    checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in checkpointer.steps(args.steps):  # ← Lastwords, line 2: restores, counts, marks each boundary
        inputs, targets = random_batch(text, args.batch_size)
        loss = functional.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
        checkpointer.report(loss=loss.item())  # shown in the live view; may be left out
        # Before the gradients leave: once others have them, the job may go on after this step even if this rank dies.
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.out:
            with open(f"{args.out}.rank{rank}.jsonl", "a") as losses:
                losses.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + whole(tensor).numpy().tobytes())
    if rank == 0:
        print(f"weights sha256 {weights.hexdigest()}", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"sha256": weights.hexdigest(), "steps": args.steps}) + "\n")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
