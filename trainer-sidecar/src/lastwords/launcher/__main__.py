"""`python -m lastwords.launcher`: the command of a worker's trainer container."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from lastwords.launcher import commands, interpreters
from lastwords.launcher.launcher import Launcher, Options, Program


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
    return asyncio.run(Launcher(options, _program(command)).run())


def _program(words: list[str]) -> Program:
    try:
        command = commands.parse(words)
        return Program(command=command, runner=interpreters.find_runner(command, os.environ, os.getcwd()))
    except commands.CommandError as error:
        return Program(error=str(error))


if __name__ == "__main__":
    sys.exit(main())
