"""
The piece table of the attempt, agreed through its store: digests first, each distinct list once.

Every rank computes the same table from the same messages. The generation stays what it was when the table is the
one that the volumes already know (a restart), so that parts in memory go on counting; otherwise it is one higher.
The lowest rank of each worker writes `layout.json`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from lastwords.protocol import chunks, codec, pieces, volume
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.pieces import PieceTable, Topology

WAIT_SECONDS = 5.0


class ExchangeEnded(Exception):
    """The exchange was given up: the store is gone or the process ends."""


def known_table(folder: str) -> PieceTable | None:
    """The table of an earlier attempt in the volume, or None."""
    try:
        with open(os.path.join(folder, volume.LAYOUT), "rb") as file:
            return codec.loads(PieceTable, file.read())
    except (FileNotFoundError, codec.DecodeError):
        return None


def write_table(folder: str, table: PieceTable, rank: int) -> None:
    """Put `layout.json` in place, whole. All ranks of a worker may do so at once."""
    path = os.path.join(folder, volume.LAYOUT)
    new = f"{path}.new-{rank}"
    with open(new, "wb") as file:
        file.write(codec.dumps(table))
    os.rename(new, path)


def exchange(
    store: Any, number: int, rank: int, layout: Sequence[Chunk], known: PieceTable | None, topology: Topology,
    ended: Callable[[], bool],
) -> tuple[PieceTable, bool]:  # fmt: skip
    """
    The table of all ranks' layouts, and whether all of them knew it; `number` counts the exchanges of an attempt.

    Blocks until every rank has taken part. Raises ExchangeEnded, or LayoutError when names do not fit together or no
    rank holds some part of a tensor.
    """
    base = f"lastwords/layout/{number}"
    body = codec.dumps(list(layout))
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    if known is not None and known.topology != topology:
        known = None
    message = [digest, known.generation if known else 0, _content(known) if known else ""]
    store.set(f"{base}/digest/{rank}", json.dumps(message))
    keys = [f"{base}/digest/{other}" for other in range(topology.world)]
    wait(store, keys, ended)
    messages = [json.loads(text) for text in store.multi_get(keys)]
    digests = [message[0] for message in messages]
    if digests.index(digest) == rank:
        store.set(f"{base}/list/{digest}", body)
    lists: dict[str, tuple[Chunk, ...]] = {digest: tuple(layout)}
    for other in dict.fromkeys(digests):
        if other not in lists:
            wait(store, [f"{base}/list/{other}"], ended)
            lists[other] = codec.loads(tuple[Chunk, ...], store.get(f"{base}/list/{other}"))
    newest = max(message[1] for message in messages)
    by_rank = {other: lists[text] for other, text in enumerate(digests)}
    table = pieces.build_table(by_rank, topology, max(newest, 1))
    chunks.check_complete(table.chunks)
    known_contents = {message[2] for message in messages if message[1] == newest}
    if newest and known_contents != {_content(table)}:
        table = pieces.build_table(by_rank, topology, newest + 1)
    return table, all(message[1:] == [table.generation, _content(table)] for message in messages)


def publish_digests(store: Any, table: PieceTable, step: int, rank: int, digests: dict[str, int]) -> None:
    """Say what this rank holds at `step` (`copying.content_digests`, taken while the tensors rest)."""
    text = json.dumps(digests).encode()
    store.set(_content_key(table, step, rank), zlib.compress(text, 1))


def compare_digests(
    store: Any, table: PieceTable, step: int, rank: int, digests: dict[str, int], ended: Callable[[], bool]
) -> str:
    """What this rank holds otherwise than the first holder of the same chunk; "" when nothing."""
    firsts: dict[int, list[str]] = {}
    for piece in table.pieces:
        holders = pieces.bits(piece.holders)
        if rank in holders and holders[0] != rank:
            keys = firsts.setdefault(holders[0], [])
            keys.extend(table.chunks[index].key for index in piece.chunk_ids)
    for first, keys in firsts.items():
        name = _content_key(table, step, first)
        wait(store, [name], ended)
        theirs = json.loads(zlib.decompress(store.get(name)))
        for key in keys:
            if key in digests and key in theirs and digests[key] != theirs[key]:
                return (
                    f"{key} is not the same on ranks {first} and {rank}, although both name it so. If these are two "
                    "tensors (as in stages of a pipeline that both begin at layer 0), give each module a name that is "
                    "unique over all ranks. If they are copies of one, see to it that they start equal and get the "
                    "same gradients: DistributedDataParallel does both, but only for parameters that were trainable "
                    "when it was made"
                )
    return ""


def _content_key(table: PieceTable, step: int, rank: int) -> str:
    return f"lastwords/content/{table.generation}/{step}/{rank}"


def wait(store: Any, keys: list[str], ended: Callable[[], bool]) -> None:
    """Wait for keys without a limit, but not beyond the end of the process or of the store."""
    while not ended():
        try:
            store.wait(keys, datetime.timedelta(seconds=WAIT_SECONDS))
            return
        except Exception as error:
            if "timeout" not in str(error).lower():
                raise ExchangeEnded(str(error)) from None
    raise ExchangeEnded("the process ends")


def _content(table: PieceTable) -> str:
    """Digest of a table without its generation."""
    return hashlib.blake2b(codec.dumps([table.topology, table.chunks, table.pieces]), digest_size=16).hexdigest()
