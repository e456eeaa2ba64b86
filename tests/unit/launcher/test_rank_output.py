"""Log files have everything; the console is only a view."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Iterator

import pytest

from lastwords.launcher.output import Console, Output
from tests.processes.launcher.fake_agent import until


@pytest.fixture
def shown() -> Iterator[tuple[Console, int]]:
    read_end, write_end = os.pipe()
    yield Console(write_end), read_end
    os.close(read_end)


def _everything(console: Console, read_end: int) -> list[bytes]:
    console.close(5.0)
    os.set_blocking(read_end, False)
    data = b""
    try:
        while part := os.read(read_end, 1 << 16):
            data += part
    except BlockingIOError:
        pass
    return data.splitlines()


def test_lines_of_two_ranks_are_never_mixed_nor_lost(shown: tuple[Console, int], tmp_path: pathlib.Path) -> None:
    console, read_end = shown
    output = Output(console)
    streams = []
    for rank in range(2):
        stream, descriptor = output.open()
        stream.attach(f"rank {rank}", str(tmp_path / f"{rank}.log"))
        streams.append((stream, descriptor))
    texts = [b"".join(b"%d says %d\n" % (rank, line) for line in range(300)) + b"no end" for rank in range(2)]
    # In pieces that do not end where lines do, by turns.
    for start in range(0, len(texts[0]), 7):
        for text, (_, descriptor) in zip(texts, streams, strict=True):
            os.write(descriptor, text[start : start + 7])
    for _, descriptor in streams:
        os.close(descriptor)
    until(lambda: all(stream.ended for stream, _ in streams), "all is read", 10)
    lines = _everything(console, read_end)
    for rank in range(2):
        assert (tmp_path / f"{rank}.log").read_bytes() == texts[rank]
        own = [line for line in lines if line.startswith(b"[rank %d] " % rank)]
        assert own == [b"[rank %d] %s" % (rank, line) for line in texts[rank].split(b"\n")]
    assert len(lines) == 602
    tail = streams[0][0].tail().splitlines()
    assert len(tail) == 40 and tail[-1] == "no end" and tail[-2] == "0 says 299"
    output.close(1.0)


def test_a_blocked_console_holds_up_nobody_and_says_what_is_missing(
    shown: tuple[Console, int], tmp_path: pathlib.Path
) -> None:
    console, read_end = shown
    output = Output(console)
    stream, descriptor = output.open()
    stream.attach("rank 0", str(tmp_path / "log"))
    text = b"".join(b"line %06d %s\n" % (line, b"x" * 80) for line in range(30_000))
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)  # returns although nobody reads the console
    until(lambda: stream.ended, "all is read", 10)
    assert (tmp_path / "log").read_bytes() == text
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(os.fdopen(os.dup(read_end), "rb")), daemon=True)
    reader.start()
    until(lambda: len(lines) > 10_000, "the console goes on", 10)
    console.say("end")
    until(lambda: lines[-1] == b"lastwords: end\n", "the last line is shown", 10)
    notes = [line for line in lines if b"are not shown here" in line]
    assert notes
    # One note for each gap; how many gaps there are is the scheduler's doing.
    missing = sum(int(note.split()[1]) for note in notes)
    assert missing + sum(line.startswith(b"[rank 0] ") for line in lines) == 30_000
    assert b"not shown" not in (tmp_path / "log").read_bytes()
    output.close(1.0)


def test_a_broken_console_is_ignored(tmp_path: pathlib.Path) -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end)
    os.close(read_end)
    output = Output(console)
    stream, descriptor = output.open()
    stream.attach("rank 0", str(tmp_path / "log"))
    for line in range(1000):
        os.write(descriptor, b"%d\n" % line)
    os.close(descriptor)
    until(lambda: stream.ended, "all is read", 10)
    assert len((tmp_path / "log").read_bytes().splitlines()) == 1000
    console.close(1.0)
    output.close(1.0)


def test_a_full_file_system_costs_log_lines_not_the_rank(shown: tuple[Console, int]) -> None:
    console, read_end = shown
    output = Output(console)
    stream, descriptor = output.open()
    stream.attach("rank 0", "/dev/full")
    os.write(descriptor, b"one\ntwo\n")
    os.close(descriptor)
    until(lambda: stream.ended, "all is read", 10)
    lines = _everything(console, read_end)
    assert b"[rank 0] one" in lines and b"[rank 0] two" in lines
    assert sum(b"cannot be written" in line and b"No space left" in line for line in lines) == 1
    output.close(1.0)


def test_what_came_before_the_rank_was_known_goes_to_its_log(
    shown: tuple[Console, int], tmp_path: pathlib.Path
) -> None:
    console, read_end = shown
    output = Output(console)
    stream, descriptor = output.open()
    os.write(descriptor, b"warning while importing\n")
    until(lambda: stream.tail() == "warning while importing", "it is read", 10)
    stream.attach("rank 5", str(tmp_path / "log"))
    os.write(descriptor, b" 10%\r 20%\r100%\ndone\n")
    os.close(descriptor)
    until(lambda: stream.ended, "all is read", 10)
    assert (tmp_path / "log").read_bytes() == b"warning while importing\n 10%\r 20%\r100%\ndone\n"
    assert _everything(console, read_end) == [b"[rank 5] warning while importing", b"[rank 5] 100%", b"[rank 5] done"]
    output.close(1.0)
