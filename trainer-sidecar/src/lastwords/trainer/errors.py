"""
Telling an error of the script from the echo of another rank's death. Pure.

When a rank dies its peers get "connection closed" or a timeout out of a collective. Such a *secondary* error is never
the root of a fault by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NETWORK_TYPES = frozenset({"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"})
_BACKEND_TYPE = "torch.distributed.DistBackendError"

_OWN_FAULTS = re.compile(
    r"EADDRINUSE|address already in use|ncclInvalidUsage|ncclInvalidArgument|ncclUnhandledCudaError|"
    r"unhandled cuda error|out of memory|Detected mismatch between collectives",
    re.IGNORECASE,
)
"""Errors of these types that have their cause in this process or its script."""

_GLOO = re.compile(
    r"gloo/|Connection closed by peer|Connection reset by peer|Application timeout caused pair closure|"
    r"Timed out waiting \d+ ?ms for (recv|send) operation|failed to pass monitoredBarrier|"
    r"Gloo connectFullMesh failed|ncclRemoteError|ncclSystemError|Watchdog caught collective operation timeout|"
    r"collective operation timeout|NCCL communicator was aborted",
)
"""What gloo and NCCL say, also inside a plain RuntimeError, when a peer is gone or late."""


def is_secondary(error: BaseException) -> bool:
    """Whether `error` is, or was raised while handling, the echo of another rank's death."""
    root = list(_chain(error))[-1]
    return looks_secondary([_qualified(kind) for kind in type(root).__mro__], str(root))


def looks_secondary(types: list[str], message: str) -> bool:
    """The same from the qualified names of an exception's type and its bases, and its text."""
    if _OWN_FAULTS.search(message):
        return False
    if _NETWORK_TYPES.intersection(types):
        return True
    if _BACKEND_TYPE in types:
        return True
    # Socket errors of Python itself are the script's own (a download, a logger); gloo's come as RuntimeError.
    return "RuntimeError" in types and _GLOO.search(message) is not None


def name(error: BaseException) -> str:
    """Qualified name of the error's type, without "builtins."."""
    return _qualified(type(error))


def _qualified(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from or while handling, down to the one that came first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__
