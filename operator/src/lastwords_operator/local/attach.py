"""Watches a job on which another `lastwords run` acts."""

from __future__ import annotations

import contextlib
import json
import time

from lastwords.protocol import codec
from lastwords_operator.local import outcome
from lastwords_operator.local.folder import FolderError, JobFolder, read_json
from lastwords_operator.local.tail import Tail
from lastwords_operator.view.build import event_view
from lastwords_operator.view.model import JobView
from lastwords_operator.view.show import Display

POLL_SECONDS = 0.2


def newest_view(folder: JobFolder) -> JobView | None:
    """The picture that the acting coordinator wrote last, or the last one of a coordinator that ended."""
    for path in (folder.view_file, folder.path / "last-view.json"):
        try:
            data = read_json(path)
            if data is not None:
                return codec.from_plain(JobView, data, "view")
        except (FolderError, codec.DecodeError):
            continue  # of another version
    return None


def watch(folder: JobFolder, workers: int, display: Display) -> int | None:
    """Show the job until nobody acts on it any more; its exit code, None when it is not over."""
    events = Tail(folder.events_file)
    logs = [Tail(folder.logs / f"trainer-{worker}.log") for worker in range(workers)]
    view = None
    try:
        view = _follow(folder, events, logs, display)
    except KeyboardInterrupt:
        display.close(None)
        print("not watching any more; the job goes on", flush=True)
        return outcome.STOPPED
    display.close(newest_view(folder) or view)
    return outcome.read(folder)


def _follow(folder: JobFolder, events: Tail, logs: list[Tail], display: Display) -> JobView | None:
    view = None
    while folder.locked_by() is not None:
        view = newest_view(folder) or view
        for line in events.read():
            with contextlib.suppress(ValueError):  # a coordinator was killed while it wrote this line
                display.event(event_view(json.loads(line)))
        for log in logs:
            for line in log.read():
                display.log(line)
        if view is not None:
            display.update(view)
        time.sleep(POLL_SECONDS)
    return view
