"""Entry point of the `lastwords` command. Light: a Ctrl-C counts from its first moment, not after its imports."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lastwords_operator import interrupts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    with interrupts.counted():
        from lastwords_operator import commands

        return commands.main(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
