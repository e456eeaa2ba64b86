"""Where the view goes: a live picture on a terminal, lines elsewhere."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lastwords_operator.view import render
from lastwords_operator.view.model import EventView, JobView

PROGRESS_SECONDS = 10.0
"""A plain progress line comes at a change of state, and at least this often while steps are made."""


class Display(Protocol):
    """Something that shows a job."""

    def log(self, line: str) -> None:
        """A line of a rank's output."""

    def event(self, event: EventView) -> None:
        """Something happened."""

    def update(self, view: JobView) -> None:
        """The picture now."""

    def close(self, view: JobView | None) -> None:
        """The end, with the last picture."""


class PlainDisplay:
    """Lines on standard output."""

    def __init__(self, progress_seconds: float = PROGRESS_SECONDS) -> None:
        self._progress_seconds = progress_seconds
        self._shown: JobView | None = None

    def log(self, line: str) -> None:
        """Lines of ranks come with their prefix already."""
        print(line, flush=True)

    def event(self, event: EventView) -> None:
        """One line."""
        print(render.plain_event(event), flush=True)

    def update(self, view: JobView) -> None:
        """A line when the state changed, or after a while when the step did."""
        last = self._shown
        changed = last is None or (last.state, last.attempt) != (view.state, view.attempt)
        late = last is not None and view.at - last.at >= self._progress_seconds and view.step != last.step
        if changed or late:
            self._shown = view
            print(render.plain_progress(view), flush=True)

    def close(self, view: JobView | None) -> None:
        """The summary."""
        if view is not None:
            print(render.to_text(render.summary(view)), end="", flush=True)


class LiveDisplay:
    """A picture that is drawn over and over."""

    def __init__(self) -> None:
        self._console = Console()
        self._lines: collections.deque[str] = collections.deque(maxlen=render.LOG_LINES)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def log(self, line: str) -> None:
        """Into the output pane."""
        self._lines.append(Text.from_ansi(line).plain)

    def event(self, event: EventView) -> None:
        """Tracebacks are too long for the event pane: they scroll by above the picture."""
        if "\n" in event.text:
            self._console.print(Text(render.plain_event(event)))

    def update(self, view: JobView) -> None:
        """Draw anew."""
        self._live.update(render.live(view, list(self._lines)), refresh=True)

    def close(self, view: JobView | None) -> None:
        """Leave the last picture and print the summary below it."""
        self._live.stop()
        if view is not None:
            self._console.print(render.summary(view))


class Guarded:
    """A display whose terminal or pipe may go away: the job goes on without it."""

    def __init__(self, inner: Display) -> None:
        self._inner: Display | None = inner

    def log(self, line: str) -> None:
        """See Display."""
        self._do(lambda inner: inner.log(line))

    def event(self, event: EventView) -> None:
        """See Display."""
        self._do(lambda inner: inner.event(event))

    def update(self, view: JobView) -> None:
        """See Display."""
        self._do(lambda inner: inner.update(view))

    def close(self, view: JobView | None) -> None:
        """See Display."""
        self._do(lambda inner: inner.close(view))

    def _do(self, call: Callable[[Display], None]) -> None:
        if self._inner is None:
            return
        try:
            call(self._inner)
        except OSError:
            self._inner = None
            # The interpreter flushes standard output once more at its end, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def display(*, plain: bool) -> Display:
    """The live view on a terminal, unless plain lines are wanted."""
    return Guarded(PlainDisplay() if plain or not sys.stdout.isatty() else LiveDisplay())
