"""`python -m lastwords.agent`: the sidecar of one worker."""

from __future__ import annotations

import asyncio
import logging
import sys

from lastwords.agent import agent, settings
from lastwords.agent.local import AnotherAgentError


def main() -> int:
    """Exit code 0: ended as ordered, or after last words; 1: it could not start."""
    given = settings.parse(sys.argv[1:])
    logging.basicConfig(format=f"%(asctime)s agent {given.worker}: %(message)s", level=logging.INFO)
    try:
        asyncio.run(agent.run(given))
    except (AnotherAgentError, OSError) as error:
        print(f"lastwords agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
