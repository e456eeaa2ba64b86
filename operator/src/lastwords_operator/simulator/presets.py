"""Published systems to begin a simulation with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Numbers of a published system, and where they stand. `per_1000_node_days`: failures."""

    nodes: int
    per_1000_node_days: float
    source: str
    stall_seconds: float = 1.0
    durable_seconds: float = 60.0


PRESETS = {
    "llama3-405b": Preset(
        nodes=2048, per_1000_node_days=3.79,
        source="419 unexpected interruptions in 54 days on 16 384 GPUs (arXiv 2407.21783); save costs assumed",
    ),
    "rsc-1-1024": Preset(
        nodes=128, per_1000_node_days=6.5, stall_seconds=300.0, durable_seconds=300.0,
        source="6.5 failures per 1000 node-days, saves of about 5 minutes (arXiv 2410.21680); here blocking",
    ),
    "rsc-2-1024": Preset(
        nodes=128, per_1000_node_days=2.34, stall_seconds=300.0, durable_seconds=300.0,
        source="2.34 failures per 1000 node-days, saves of about 5 minutes (arXiv 2410.21680); here blocking",
    ),
}  # fmt: skip
