"""Lastwords in the training process: `from lastwords import Checkpointer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastwords.trainer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the Checkpointer at first use: agent and launcher import this package where torch does not exist."""
    if name == "Checkpointer":
        from lastwords.trainer.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
