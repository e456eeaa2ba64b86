"""
What every store must do: a folder, with and without links; S3 by a real server; the adapter of object stores over
obstore's store in memory, which stands for Google Cloud Storage and Azure; and the store for tests.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from lastwords.storage import base, places
from lastwords.storage.base import StorageError, Store
from lastwords.storage.faulty import FaultyStore
from lastwords.storage.posix import PosixStore


def without_links(folder: pathlib.Path) -> PosixStore:
    store = PosixStore(folder)
    store._links = False
    return store


MAKERS: dict[str, Callable[[pathlib.Path], Store]] = {
    "links": PosixStore,
    "no links": without_links,
    "faulty": lambda folder: FaultyStore(PosixStore(folder)),
}


@pytest.fixture(params=[*MAKERS, "s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Store:
    if request.param in MAKERS:
        return MAKERS[request.param](tmp_path / "root")
    if request.param == "s3":
        return places.open_store(request.getfixturevalue("s3_server").prefix())
    pytest.importorskip("obstore", reason="this environment has no client of object stores")
    import obstore.store

    from lastwords.storage import objects

    return objects.ObjectStore(obstore.store.MemoryStore(), "memory://here")


def test_create_is_exclusive_and_whole(store: Store) -> None:
    assert store.create("a/b/c", b"one")
    assert not store.create("a/b/c", b"two")
    assert not store.create("a/b/c", b"on")
    assert base.read(store, "a/b/c") == b"one"
    assert store.list("a/b") == ["c"], "nothing else is left"


def test_of_many_creators_one_wins(store: Store) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def race(number: int) -> None:
        start.wait()
        if store.create("x", b"%d" % number * 1000):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert base.read(store, "x") == b"%d" % won[0] * 1000


def test_write_replaces_and_cuts_to_length(store: Store) -> None:
    store.write("a/x", [b"1234", memoryview(b"5678")], 8)
    store.write("a/x", [b"abc"], 3)
    assert base.read(store, "a/x") == b"abc"


def test_a_write_of_the_same_bytes_never_shortens_the_file(store: Store) -> None:
    store.write("x", [b"aa", b"bb"], 4)
    sizes = []

    def pieces() -> list[bytes]:
        with store.open("x") as file:
            sizes.append(file.nbytes)
        return [b"aa", b"bb"]

    store.write("x", (piece for piece in pieces()), 4)
    assert sizes == [4]


def test_missing_things_are_gone_and_not_errors_where_that_is_meant(store: Store) -> None:
    assert base.read(store, "a/b") is None
    assert store.list("a") == []
    store.remove("a/b")
    with pytest.raises(StorageError) as caught, store.open("a/b"):
        pass
    assert caught.value.kind == "gone"


def test_remove_takes_files_and_empty_folders(store: Store) -> None:
    store.create("a/b", b"")
    store.remove("a/b")
    store.remove("a")
    assert store.list("") == [] or store.list(".") == []


def test_a_large_file_is_whole_although_its_pieces_come_in_one_buffer(store: Store) -> None:
    data = random.Random(1).randbytes(20 * 1024 * 1024 + 17)
    buffer = bytearray(1024 * 1024)

    def pieces() -> Iterator[memoryview]:
        for begin in range(0, len(data), len(buffer)):
            piece = data[begin : begin + len(buffer)]
            buffer[: len(piece)] = piece
            yield memoryview(buffer)[: len(piece)]

    store.write("a/x", pieces(), len(data))
    with store.open("a/x") as file:
        assert file.nbytes == len(data)
        assert file.read_at(0, len(data)) == data
        assert file.read_at(8 * 1024 * 1024 - 5, 10) == data[8 * 1024 * 1024 - 5 : 8 * 1024 * 1024 + 5]


@pytest.mark.parametrize("nbytes", [1000, 20 * 1024 * 1024])
def test_what_goes_wrong_while_pieces_are_made_comes_through(store: Store, nbytes: int) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(18):
            yield bytes(nbytes // 20)
        raise KeyError("given up")

    with pytest.raises(KeyError, match="given up"):
        store.write("x", pieces(), nbytes)
    assert len(base.read(store, "x") or b"") < nbytes, "nothing that looks whole"


def test_read_at_gives_ranges(store: Store) -> None:
    store.write("x", [b"0123456789"], 10)
    with store.open("x") as file:
        assert (file.nbytes, file.read_at(3, 4), file.read_at(8, 100), file.read_at(50, 1)) == (10, b"3456", b"89", b"")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "read-only"), (errno.EACCES, "read-only"),
        (errno.ESTALE, "stale"), (errno.ENOENT, "gone"), (errno.EIO, "other"),
    ],
)  # fmt: skip
def test_O_33_O_36_every_system_error_becomes_a_kind_and_a_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    store = PosixStore(tmp_path)
    store.links()

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.write", fail)
    with pytest.raises(StorageError) as caught:
        store.write("x", [b"1"], 1)
    assert caught.value.kind == kind
    assert str(tmp_path / "x") in str(caught.value)


def test_O_34_a_file_system_without_links_is_found_out_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(source: str, target: str) -> None:
        tried.append(target)
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.link", refuse)
    store = PosixStore(tmp_path)
    assert store.create("x", b"1")
    assert not store.create("x", b"2")
    assert store.create("y", b"2")
    assert len(tried) == 1
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_O_34_without_links_what_a_dead_writer_began_is_finished_by_whoever_has_the_same_bytes(
    tmp_path: pathlib.Path,
) -> None:
    store = without_links(tmp_path)
    for torn in (b"", b"ab"):
        (tmp_path / "x").write_bytes(torn)
        assert not store.create("x", b"zzz") or torn == b""
        (tmp_path / "x").write_bytes(torn)
        assert store.create("x", b"abcdef")
        assert base.read(store, "x") == b"abcdef"
    assert not store.create("x", b"abcdef"), "a whole one is not created again"


def test_a_root_that_is_gone_is_not_made_anew(tmp_path: pathlib.Path) -> None:
    store = PosixStore(tmp_path / "root")
    store.create("a/x", b"1")
    (tmp_path / "root").rename(tmp_path / "aside")
    for call in (lambda: store.create("a/y", b"1"), lambda: store.write("a/x", [b"1"], 1)):
        with pytest.raises(StorageError, match="the storage folder .* is not there") as caught:
            call()
        assert caught.value.kind == "gone"
    assert not (tmp_path / "root").exists()
    (tmp_path / "aside").rename(tmp_path / "root")
    assert store.create("a/y", b"1")


def test_O_34_nothing_is_ever_renamed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rename", "replace", "renames"):
        monkeypatch.setattr(f"os.{name}", lambda *_: pytest.fail("rename overwrites and may not be atomic"))
    store = PosixStore(tmp_path)
    store.create("a/x", b"1")
    store.write("a/y", [b"1"], 1)
