"""`lastwords status`."""

from __future__ import annotations

import json
import pathlib

from rich.console import Console

from lastwords.protocol import codec
from lastwords_operator.local import attach, outcome
from lastwords_operator.local.folder import FolderError, JobFolder
from lastwords_operator.local.store import read_status
from lastwords_operator.view import render

DEFAULT = pathlib.Path(".lastwords")


def show(directory: pathlib.Path | None, *, as_json: bool) -> int:
    """Print how the job is. FolderError when there is none."""
    folder = JobFolder(directory if directory is not None else _only_one())
    if not folder.exists():
        raise FolderError(f"{folder.path} is not the folder of a job (it has no {folder.job_file.name})")
    status, version = read_status(folder)
    view = attach.newest_view(folder)
    pid = folder.locked_by()
    if as_json:
        row = {
            "folder": str(folder.path),
            "coordinator": pid,
            "exit_code": outcome.read(folder),
            "version": version,
            "status": codec.to_plain(status),
            "view": codec.to_plain(view),
        }
        print(json.dumps(row, indent=2))
        return 0
    console = Console()
    if view is None:
        console.print(f"{folder.path}: nothing has run here yet", highlight=False)
    elif pid is not None:
        console.print(render.live(view, []))
    else:
        console.print(render.summary(view))
        if status is not None and not status.state.over:
            console.print("nobody acts on it now; the command it was started with goes on with it")
    return 0


def _only_one() -> pathlib.Path:
    found = sorted(path.parent for path in DEFAULT.glob("*/job.json"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise FolderError(f"there is no job in {DEFAULT}/; name its folder: lastwords status DIR")
    raise FolderError(f"there are several jobs, name one: {', '.join(map(str, found))}")
