"""What an agent is started with."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

from lastwords.protocol import environment
from lastwords.protocol.pieces import Topology
from lastwords.storage import places


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Command line and environment of the agent."""

    volume: str
    worker: int
    incarnation: str
    coordinator: str
    """"unix:/path" or "http://host:port"."""
    storage: str
    job_uid: str
    job_name: str
    namespace: str
    token: str
    topology: Topology
    """Until an order brings another one."""
    fetch_host: str = "127.0.0.1"
    coordinator_lost_seconds: float = 60.0
    slots: int = 2
    resume_from: str = ""
    """Where another job's checkpoint is that this one begins with."""
    save_seconds: float = 300.0
    """Deadline of one write to storage."""
    others_seconds: float = 60.0
    """How long the parts of other workers are waited for."""


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from a command line; ends the process with a sentence when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lastwords.agent", description="The sidecar of one worker.")
    parser.add_argument("--volume", required=True, metavar="DIR", help="memory volume of the worker")
    parser.add_argument("--worker", required=True, type=int, metavar="N", help="number of the worker")
    parser.add_argument("--incarnation", required=True, metavar="S", help="which life of the worker's memory this is")
    parser.add_argument("--coordinator", required=True, metavar="ADDRESS", help="unix:/path or http://host:port")
    parser.add_argument("--storage", required=True, metavar="PLACE", help="folder or URL for checkpoints")
    parser.add_argument("--job-uid", required=True, metavar="UID")
    parser.add_argument("--job-name", required=True, metavar="NAME")
    parser.add_argument("--namespace", required=True, metavar="NS")
    parser.add_argument("--token-file", required=True, metavar="FILE", help="secret that all agents of the job share")
    parser.add_argument("--workers", required=True, type=int, metavar="N")
    parser.add_argument("--procs", required=True, type=int, metavar="N", help="ranks per worker")
    parser.add_argument("--fetch-host", default="127.0.0.1", metavar="IP", help="address for other workers' agents")
    parser.add_argument("--coordinator-lost-seconds", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--resume-from", default="", metavar="PLACE", help="folder or URL of a job or checkpoint")
    given = parser.parse_args(arguments)
    if not os.path.isdir(given.volume):
        parser.error(f"the memory volume {given.volume} is not a folder")
    if not given.coordinator.startswith(("unix:", "http://", "https://")):
        parser.error(f"--coordinator must begin with unix: or http://, it is {given.coordinator}")
    try:
        storage = places.normal(given.storage)
    except places.PlaceError as error:
        parser.error(str(error))
    try:
        with open(given.token_file, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        parser.error(f"the token file cannot be read: {error}")
    return Settings(
        volume=os.path.abspath(given.volume),
        worker=given.worker,
        incarnation=given.incarnation,
        coordinator=given.coordinator,
        storage=storage,
        job_uid=given.job_uid,
        job_name=given.job_name,
        namespace=given.namespace,
        token=token,
        topology=Topology(workers=given.workers, processes_per_worker=given.procs),
        fetch_host=given.fetch_host,
        coordinator_lost_seconds=given.coordinator_lost_seconds,
        resume_from=given.resume_from,
        slots=int(os.environ.get(environment.SLOTS, "2")),
    )
