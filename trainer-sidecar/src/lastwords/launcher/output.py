"""
Output of the rank processes: into a log file each, and line by line, prefixed, to the launcher's own output.

One thread reads the pipes and writes the files, another writes the console, so that neither a slow file system nor a
blocked console holds up the launcher, and a blocked or broken console never holds up a rank: then lines are
left out of the console, and counted. The files have everything. A full file system costs log lines, not the job.
"""

from __future__ import annotations

import collections
import fcntl
import os
import selectors
import threading
import time
from collections.abc import Callable

_TAIL_LINES = 40
_TAIL_LINE_BYTES = 2000
_PIPE_BYTES = 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_EARLY_BYTES = 64 * 1024
_PARTIAL_BYTES = 64 * 1024
_CONSOLE_LINES = 10_000


class Console:
    """Lines to a file descriptor, in order, written by a thread of its own; never blocks whoever calls `put`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: collections.deque[bytes] = collections.deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._closing = False
        self._broken = False
        """Whoever read it is gone (the coordinator died); the log files go on."""
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Show a line (without its line end), or count it as left out when too many wait."""
        with self._changed:
            if self._broken:
                return
            if len(self._lines) >= _CONSOLE_LINES:
                self._dropped += 1
                return
            if self._dropped:
                self._lines.append(b"lastwords: %d lines are not shown here; the log files have them" % self._dropped)
                self._dropped = 0
            self._lines.append(line)
            self._changed.notify()

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self.put(f"lastwords: {text}".encode(errors="replace"))

    def close(self, timeout_seconds: float) -> None:
        """Write what waits, for at most that long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closing:
                    self._changed.wait()
                if not self._lines:
                    return
                batch = b"\n".join(self._lines.popleft() for _ in range(min(len(self._lines), 100))) + b"\n"
            try:
                _write_all(self._descriptor, batch)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._lines.clear()
                return


class Stream:
    """Output of one process. Until it is attached to a rank its last bytes are kept for whoever asks."""

    def __init__(self, descriptor: int, console: Console) -> None:
        self.descriptor = descriptor
        self.ended = False
        """All its writers are gone and everything has been read."""
        self.on_end: Callable[[], None] | None = None
        """Called by the reading thread."""
        self._console = console
        self._lock = threading.Lock()
        self._early = b""
        self._prefix = b""
        self._file = -1
        self._partial = b""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self._lost_bytes = 0

    def attach(self, label: str, path: str) -> None:
        """From now on (and what came before) into the file `path` and, as `[label] line`, to the console."""
        with self._lock:
            self._prefix = f"[{label}] ".encode()
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as error:
                self._console.say(f"the log file {path} cannot be written ({error}): its output is only shown here")
            early, self._early = self._early, b""
            self._take(early)

    def tail(self) -> str:
        """The last lines."""
        with self._lock:
            lines = [*self._tail, self._partial] if self._prefix else self._early.splitlines()[-_TAIL_LINES:]
        return b"\n".join(line[:_TAIL_LINE_BYTES] for line in lines if line).decode(errors="replace")

    def feed(self, data: bytes) -> None:
        """What was read from the process; empty at its end."""
        with self._lock:
            if not self._prefix:
                self._early = (self._early + data)[-_EARLY_BYTES:]
            elif data:
                self._take(data)
            elif self._partial:
                self._show(self._partial)
                self._partial = b""
            if not data and self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _take(self, data: bytes) -> None:
        self._keep(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self._partial) > _PARTIAL_BYTES:
            # A progress bar, or one endless line.
            self._show(self._partial)
            self._partial = b""

    def _keep(self, data: bytes) -> None:
        if self._file < 0:
            return
        try:
            _write_all(self._file, data)
        except OSError as error:
            if not self._lost_bytes:
                self._console.say(f"a log file cannot be written ({error}): from here on output may be missing in it")
            self._lost_bytes += len(data)

    def _show(self, line: bytes) -> None:
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]  # of a progress bar its newest state
        self._tail.append(line)
        self._console.put(self._prefix + line)


class Output:
    """The reading thread and its streams."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._new: collections.deque[Stream] = collections.deque()
        self._open = 0
        self._close_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def open(self) -> tuple[Stream, int]:
        """A new stream and the descriptor for its process to write to, which the caller closes in its own process."""
        read_end, write_end = os.pipe()
        try:
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except (OSError, AttributeError):
            pass  # over the user's limit, or Python 3.10 without the name: the usual size does too
        stream = Stream(read_end, self._console)
        self._new.append(stream)
        os.write(self._wake_in, b"+")
        return stream, write_end

    def close(self, timeout_seconds: float) -> None:
        """Read what is still to come, for at most that long, and end."""
        self._close_at = time.monotonic() + timeout_seconds
        os.write(self._wake_in, b"-")
        self._thread.join(timeout_seconds + 1.0)

    def _run(self) -> None:
        while self._close_at is None or (self._open and time.monotonic() < self._close_at):
            for key, _ in self._selector.select(None if self._close_at is None else 0.05):
                if key.fd == self._wake_out:
                    os.read(self._wake_out, 4096)
                else:
                    self._read(key.data)
            while self._new:
                stream = self._new.popleft()
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
                self._open += 1

    def _read(self, stream: Stream) -> None:
        data = os.read(stream.descriptor, _CHUNK_BYTES)
        stream.feed(data)
        if data:
            return
        self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        self._open -= 1
        stream.ended = True
        if stream.on_end is not None:
            stream.on_end()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
