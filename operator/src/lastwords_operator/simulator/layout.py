"""How likely the survivors of a fault still hold the whole state, by the parallel layout of the job."""

from __future__ import annotations

import math


def covered(pieces: int, replicas: int, lost: int) -> float:
    """
    Probability that every one of `pieces` pieces keeps a holder when `lost` random nodes are lost at once; each piece
    is held by `replicas` nodes of its own. By inclusion and exclusion over the pieces that lose all holders (the
    placement analysis of GEMINI, Wang et al., SOSP 2023). Assumes that all sets of nodes are equally likely.
    """
    nodes = pieces * replicas
    if not 0 <= lost <= nodes:
        raise ValueError(f"{lost} nodes cannot be lost of {nodes}")
    gone = sum(
        (1 if j % 2 else -1) * math.comb(pieces, j) * math.comb(nodes - j * replicas, lost - j * replicas)
        for j in range(1, lost // replicas + 1)
    )
    return 1 - gone / math.comb(nodes, lost)
