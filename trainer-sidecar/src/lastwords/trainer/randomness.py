"""States of the random number generators of a process: Python, numpy, torch, and CUDA where it is in use."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Everything `restore` needs."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, np.array(words, dtype=np.uint64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Go on exactly where `capture` was."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def reseed(*words: int | str) -> int:
    """New states from a hash of `words` (step, rank): where the old ones are lost. Returns the seed."""
    seed = stable_seed(*words)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    return seed


def stable_seed(*words: int | str | bytes) -> int:
    """63 bits that are the same in every process."""
    text = b"\0".join(word if isinstance(word, bytes) else str(word).encode() for word in words)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
