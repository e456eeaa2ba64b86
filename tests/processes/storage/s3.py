"""A real S3 server (moto) as a process of its own, on a port that the kernel chooses; it ends with the tests."""

from __future__ import annotations

import http.client
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

BUCKET = "checkpoints"


class Server:
    """The process, and what a client needs to know of it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    @property
    def variables(self) -> Mapping[str, str]:
        """The standard variables of a client."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "of-a-test",
            "AWS_SECRET_ACCESS_KEY": "of-a-test",
            "AWS_REGION": "us-east-1",
        }

    def prefix(self) -> str:
        """The URL of a new place."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


@contextmanager
def running() -> Iterator[Server]:
    """A server with one bucket."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.storage.s3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield Server(process, port)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    """Serve until standard input ends."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
