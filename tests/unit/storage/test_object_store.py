"""Object stores: what is theirs alone. Errors in words, uploads in parts, places and credentials."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from lastwords.storage import base, places
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import JobCheckpoints
from lastwords.storage.places import PlaceError
from tests.processes.storage import s3
from tests.unit.storage import support

objects = pytest.importorskip("lastwords.storage.objects", reason="this environment has no client of object stores")


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("s3://bucket/prefix/", "s3://bucket/prefix"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/a/b", "gs://bucket/a/b"),
        ("az://container/a", "az://container/a"),
        ("file:///data/x/", "/data/x"),
        ("/data/../x", "/x"),
    ],
)
def test_places_have_one_form(given: str, normal: str) -> None:
    assert places.normal(given) == normal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ftp://host/x", "ftp:// is not known; checkpoints go to a folder, or to file://, s3://, gs://, az://"),
        ("s3://", "name a bucket and a prefix, such as s3://bucket/prefix"),
        ("s3://bucket//x", "name a bucket and a prefix"),
        ("s3://bucket/../x", "name a bucket and a prefix"),
        ("file://data", "file:// takes an absolute path"),
    ],
)
def test_what_is_no_place_is_refused_with_a_sentence(given: str, said: str) -> None:
    with pytest.raises(PlaceError) as caught:
        places.normal(given)
    assert said in str(caught.value)


def test_the_parents_of_a_place() -> None:
    assert places.parent("s3://bucket/a/b") == "s3://bucket/a"
    assert places.parent("s3://bucket/a") == "s3://bucket"
    assert places.parent("s3://bucket") is None
    assert places.parent("/a/b") == "/a"
    assert places.parent("/") is None


def test_a_missing_bucket_is_said_and_is_not_an_empty_storage(s3_server: s3.Server) -> None:
    store = places.open_store("s3://no-such-bucket/x")
    for call in (lambda: store.create("a", b"1"), lambda: store.write("a", [b"1"], 1), lambda: store.list("a")):
        with pytest.raises(StorageError, match="The specified bucket does not exist: make the bucket first") as caught:
            call()
        assert caught.value.kind == "gone"
        assert "s3://no-such-bucket/x/a" in str(caught.value)


def test_a_server_that_does_not_answer_is_said_in_one_line(
    s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_RETRY_SECONDS", 1)
    store = places.open_store("s3://bucket/x")
    with pytest.raises(StorageError, match="creating s3://bucket/x/a: .*error") as caught:
        store.create("a", b"1")
    assert "\n" not in str(caught.value)


class _Conditional(http.server.BaseHTTPRequestHandler):
    """As Google's and Azure's servers answer a put with a condition; one without is refused."""

    names: set[str]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        google = self.headers.get("x-goog-if-generation-match") == "0"
        azure = self.headers.get("If-None-Match") == "*"
        status = 400 if not (google or azure) else 201 if self.path not in self.names else 412 if google else 409
        self.names.add(self.path)
        self.send_response(status)
        for name, value in (("ETag", '"1"'), ("x-goog-generation", "1"), ("Content-Length", "0")):
            self.send_header(name, value)
        if status == 409:
            self.send_header("x-ms-error-code", "BlobAlreadyExists")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Refusing(http.server.BaseHTTPRequestHandler):
    status, code = 403, "AccessDenied"

    def _answer(self) -> None:
        body = f"<Error><Code>{self.code}</Code><Message>Not with these credentials.</Message></Error>".encode()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_google_and_azure_are_asked_to_refuse_what_is_there(kind: str) -> None:
    import obstore.store

    class Handler(_Conditional):
        names: ClassVar[set[str]] = set()

    with serving(Handler) as url:
        plain = {"allow_http": True}
        if kind == "gs":
            key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
            config = {"service_account_key": json.dumps({**key, "private_key_id": ""})}
            client = obstore.store.GCSStore("bucket", config=config, client_options=plain)
        else:
            secret = base64.b64encode(b"k" * 32).decode()
            config = {"account_name": "account", "account_key": secret, "endpoint": url}
            client = obstore.store.AzureStore("container", config=config, client_options=plain)
        store = objects.ObjectStore(client, f"{kind}://bucket")
        assert store.create("a/b", b"1")
        assert not store.create("a/b", b"2")


def test_refused_credentials_are_a_kind_and_a_sentence(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(_Refusing) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = places.open_store("s3://bucket/x")
        with pytest.raises(StorageError, match="Not with these credentials: give the job credentials") as caught:
            store.create("a", b"1")
    assert caught.value.kind == "read-only"


def test_azure_without_an_account_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match="az://container/x: Account must be specified"):
        places.open_store("az://container/x")


def test_a_large_file_goes_up_in_parts_and_one_that_fails_leaves_none(s3_server: s3.Server) -> None:
    prefix = s3_server.prefix()
    store = places.open_store(prefix)
    store.write("large", (bytes(1 << 20) for _ in range(20)), 20 << 20)
    store.write("small", [b"1"], 1)
    key = prefix.removeprefix(f"s3://{s3.BUCKET}/")
    assert _get(s3_server, f"/{s3.BUCKET}/{key}/large?partNumber=1", "HEAD").getheader("Content-Length") == str(8 << 20)

    def broken() -> Iterator[bytes]:
        for _ in range(12):
            yield bytes(1 << 20)
        raise KeyError

    with pytest.raises(KeyError):
        store.write("broken", broken(), 20 << 20)
    assert base.read(store, "broken") is None
    left = _get(s3_server, f"/{s3.BUCKET}?uploads", "GET").read().decode()
    assert "broken" not in left, "what was sent of it is thrown away"


def _get(server: s3.Server, path: str, method: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(method, path)
    return connection.getresponse()


def test_an_inventory_asks_for_no_object_twice(s3_server: s3.Server) -> None:
    opened: list[str] = []

    class Counting(objects.ObjectStore):  # type: ignore[name-defined,misc]
        def open(self, path: str) -> contextlib.AbstractContextManager[base.Reader]:
            opened.append(path)
            reader: contextlib.AbstractContextManager[base.Reader] = super().open(path)
            return reader

    place = support.Place(s3_server.prefix(), "s3")
    for step in (10, 20):
        support.save(place.job(), step)
    real = objects.connect(place.root)
    job = JobCheckpoints(Counting(real._client, place.root), "ns", "job")
    assert [info.rejected for info in job.list_checkpoints()] == ["", ""]
    first, opened[:] = len(opened), []
    assert [info.rejected for info in job.list_checkpoints()] == ["", ""]
    assert sorted(path.rpartition("/")[2] for path in opened) == [
        *["manifest.json"] * 2,
        *["rejected.json"] * 2,
    ]
    assert first > len(opened)
    job.delete(support.identify(10))
    assert [info.id.step for info in job.list_checkpoints()] == [20]


def test_the_limit_of_parts_is_kept() -> None:
    for nbytes in (1, 8 << 20, 80 << 30, 1 << 40):
        size = objects.part_bytes(nbytes)
        assert size >= 8 << 20
        assert -(-nbytes // size) <= 10_000
