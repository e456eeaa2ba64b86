"""`python -m lastwords.launcher`: the command of a worker's trainer container."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from lastwords.launcher import programs
from lastwords.launcher.launcher import Launcher, Options
from lastwords.launcher.torchrun import Size
from lastwords.protocol import environment


def main() -> int:
    """Parse the command line and run the launcher; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lastwords.launcher",
        description="Runs the training processes of one worker as its agent says, and ends them when it says so.",
    )
    parser.add_argument("--volume", required=True, metavar="DIR", help="folder of the worker's memory volume")
    parser.add_argument("--worker", required=True, type=int, metavar="N", help="number of this worker, from 0")
    parser.add_argument("--uid", required=True, help="unique name of this worker: marks its processes")
    parser.add_argument("--logs", required=True, metavar="DIR", help="folder for the log files of the ranks")
    parser.usage = "%(prog)s --volume DIR --worker N --uid UID --logs DIR -- COMMAND ARGS..."
    words = sys.argv[1:]
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = parser.parse_args(own)
    options = Options(
        volume=os.path.abspath(arguments.volume),
        worker=arguments.worker,
        uid=arguments.uid,
        logs=os.path.abspath(arguments.logs),
    )
    os.makedirs(options.volume, mode=0o700, exist_ok=True)
    os.makedirs(options.logs, exist_ok=True)
    program = programs.load(command, os.environ, os.getcwd(), _size())
    return asyncio.run(Launcher(options, program).run())


def _size() -> Size | None:
    """How large the job is, where whoever started us says so."""
    workers, processes = (os.environ.get(name, "") for name in (environment.WORKERS, environment.PROCESSES_PER_WORKER))
    if not (workers.isdigit() and processes.isdigit()):
        return None
    return Size(workers=int(workers), processes=int(processes))


if __name__ == "__main__":
    sys.exit(main())
