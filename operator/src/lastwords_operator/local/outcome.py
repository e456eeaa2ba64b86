"""The job's exit code: kept in the folder, so that everybody who watched says the same."""

from __future__ import annotations

from lastwords_operator.core.model import JobState, JobStatus
from lastwords_operator.core.observation import Observation
from lastwords_operator.local.folder import JobFolder, read_json, replace_file

COMPLETE = 0
FAILED = 1
STOPPED = 130


def exit_code(seen: Observation, status: JobStatus) -> int:
    """
    0 for a complete job, 130 for one that was stopped. For a failed one the code of the first rank that left with a
    bad one of its own accord, else 1.
    """
    if status.state is JobState.COMPLETE:
        return COMPLETE
    if status.state is not JobState.FAILED:
        return STOPPED
    ends = [rank.exit for report in seen.reports().values() for rank in report.ranks if rank.exit is not None]
    codes = [end.code for end in ends if not end.secondary and end.code is not None and 0 < end.code < 256]
    return codes[0] if codes else FAILED


def write(folder: JobFolder, code: int) -> None:
    """Remember it."""
    replace_file(folder.path / "exit.json", f'{{"code": {code}}}\n'.encode())


def read(folder: JobFolder) -> int | None:
    """What was remembered, None when the job never ended."""
    data = read_json(folder.path / "exit.json")
    return int(data["code"]) if data is not None else None


def forget(folder: JobFolder) -> None:
    """The job goes on."""
    (folder.path / "exit.json").unlink(missing_ok=True)
