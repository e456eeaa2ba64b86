"""Blocks of a file that only the agent can read, as it lies in an object store (see `lastwords.agent.stored`)."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence

from lastwords.protocol import volume, wire
from lastwords.protocol.snapshots import BLOCK_BYTES

PATIENCE_SECONDS = 30.0
"""How long an agent that is not there is waited for: it may be starting again."""
_PAUSE_SECONDS = 0.1


class ServedError(RuntimeError):
    """The agent could not give a block; the text says why."""


def blocks(file: wire.RestoreFile, numbers: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """These blocks in this order, each valid until the next is asked for. Raises ServedError."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    done = 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while done < len(numbers):
        try:
            with _connect(os.path.dirname(file.path)) as connection, connection.makefile("rb") as stream:
                request = {"path": file.served, "blocks": list(numbers[done:])}
                connection.sendall(json.dumps(request).encode() + b"\n")
                while done < len(numbers):
                    data = _receive(stream, buffer, file)
                    yield numbers[done], data
                    done += 1
                    deadline = time.monotonic() + PATIENCE_SECONDS
        except OSError as error:
            if time.monotonic() > deadline:
                raise ServedError(f"the agent does not give {file.served}: {error}") from None
            time.sleep(_PAUSE_SECONDS)


def _connect(folder: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Through the folder's descriptor, since a socket's path is limited to about 100 bytes.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{descriptor}/{volume.STORED_SOCKET}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(descriptor)
    return connection


def _receive(stream: io.BufferedReader, buffer: memoryview, file: wire.RestoreFile) -> memoryview:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection ended")
    answer = json.loads(line)
    if "error" in answer:
        raise ServedError(f"{file.served}: {answer['error']}")
    view = buffer[: answer["nbytes"]]
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise ConnectionError("the connection ended within a block")
        done += count
    return view
