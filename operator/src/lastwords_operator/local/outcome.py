"""The job's exit code: kept in the folder, so that everybody who watched says the same."""

from __future__ import annotations

from lastwords_operator.core.model import JobState, JobStatus
from lastwords_operator.local.folder import JobFolder, read_json, replace_file

COMPLETE = 0
FAILED = 1
STOPPED = 130


def exit_code(status: JobStatus) -> int:
    """0 for a complete job, 130 for one that was stopped; for a failed one that of the faulty rank, else 1."""
    if status.state is JobState.COMPLETE:
        return COMPLETE
    if status.state is not JobState.FAILED:
        return STOPPED
    code = status.recoveries[-1].exit_code if status.recoveries else None
    return code if code is not None and 0 < code < 256 else FAILED


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
