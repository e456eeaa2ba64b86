"""`python -m tests.bench [topic ...] [--quick]`: every benchmark, or the named ones."""

from __future__ import annotations

import sys

from tests.bench import interval, persist, restart, save

TOPICS = {"persist": persist.main, "save": save.main, "restart": restart.main, "interval": interval.main}

if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(TOPICS)
    unknown = [name for name in names if name not in TOPICS]
    if unknown:
        sys.exit(f"unknown topic {unknown[0]!r}; there are {', '.join(TOPICS)}")
    for name in names:
        TOPICS[name]("--quick" in sys.argv)
