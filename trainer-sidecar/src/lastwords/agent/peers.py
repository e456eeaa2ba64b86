"""The agents of other workers, as this agent asks them."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp

from lastwords.agent.volume import Part, Record
from lastwords.protocol import codec, snapshots

log = logging.getLogger("lastwords.agent")

PROVISIONAL = "X-Lastwords-Provisional"
"""Header of a small record."""
PATIENCE_SECONDS = 15.0
"""How long an agent that does not answer is asked again: it may be starting."""
REPLICA_SECONDS = 60.0
"""How long another worker may take to get a part."""
_PAUSE_SECONDS = 0.1


class PeerError(Exception):
    """A worker could not give what it was asked for; the text says what and why."""


class Peers:
    """`addresses()` gives the newest fetch address of each worker."""

    def __init__(self, token: str, addresses: Callable[[], Mapping[int, str]]) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._addresses = addresses
        self._session: aiohttp.ClientSession | None = None
        self._pushing: dict[tuple[int, bool, int | None], tuple[bytes, Callable[[], None]] | None] = {}
        """(Rank, provisional, slot) -> the record that waits while another one is on its way, and whom to tell."""

    async def stop(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def layout(self, worker: int) -> bytes:
        """The worker's layout.json."""
        return (await self._get(worker, "/v1/layout"))[0]

    async def parts(self, worker: int, step: int, attempt: int) -> list[Part]:
        """Parts that the worker has of a step."""
        data, _ = await self._get(worker, f"/v1/parts?step={step}&attempt={attempt}")
        try:
            return [codec.from_plain(Part, item) for item in json.loads(data)]
        except (ValueError, TypeError) as error:
            raise PeerError(f"worker {worker} gave an unreadable list of parts: {error}") from None

    async def blocks(self, worker: int, part: Part, numbers: list[int]) -> AsyncIterator[tuple[int, bytes]]:
        """The wanted blocks of a part, checked: (offset in the file, bytes)."""
        record = part.record
        for number in numbers:
            begin = number * snapshots.BLOCK_BYTES
            end = min(begin + snapshots.BLOCK_BYTES, record.file_bytes)
            path = f"/v1/parts/{part.slot}/{record.rank}?sequence={part.sequence}"
            data, _ = await self._get(worker, path, {"Range": f"bytes={begin}-{end - 1}"})
            if len(data) != end - begin or zlib.crc32(data) != record.blocks[number]:
                raise PeerError(f"block {number} of the part of rank {record.rank} on worker {worker} is damaged")
            yield begin, data

    async def record(self, worker: int, rank: int, step: int, attempt: int) -> tuple[bytes, bool]:
        """A small record and whether it is provisional."""
        data, headers = await self._get(worker, f"/v1/records/{rank}/{step}?attempt={attempt}")
        return data, headers.get(PROVISIONAL) == "1"

    async def call_save(self, worker: int, step: int, attempt: int) -> None:
        """Tell a worker which step is being saved. Raises PeerError when it does not hear it."""
        address = self._addresses().get(worker)
        if not address:
            raise PeerError("its address is not known")
        timeout = aiohttp.ClientTimeout(total=5.0)
        url = f"http://{address}/v1/saves/{attempt}/{step}"
        try:
            async with self._client().post(url, headers=self._headers, timeout=timeout) as response:
                if response.status != 204:
                    raise PeerError(f"it answers {response.status}")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise PeerError(repr(error)) from None

    async def push_record(self, worker: int, record: Record, kept: Callable[[], None], slot: int | None = None) -> None:
        """
        Give a small record to a neighbour; of those that come while one is on its way only the newest follows.

        `slot`: it is that of the snapshot there. Calls `kept` when it is there. A failure is nobody's business: the
        next boundary tries again.
        """
        lane = (record.head.rank, record.head.provisional, slot)
        busy = lane in self._pushing
        self._pushing[lane] = (record.body, kept)
        if busy:
            return
        try:
            while (waiting := self._pushing[lane]) is not None:
                self._pushing[lane] = None
                body, done = waiting
                if await self._push_once(worker, lane[0], body, slot):
                    done()
        finally:
            del self._pushing[lane]

    async def _push_once(self, worker: int, rank: int, body: bytes, slot: int | None) -> bool:
        address = self._addresses().get(worker)
        if not address:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=5.0)
            url = f"http://{address}/v1/neighbour/{rank}" + ("" if slot is None else f"?slot={slot}")
            async with self._client().post(url, data=body, headers=self._headers, timeout=timeout) as response:
                await response.read()
                return response.status == 204
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            log.debug("the record of rank %d did not reach worker %d: %s", rank, worker, error)
            return False

    async def replicate(self, worker: int, owner: int, part: Part) -> None:
        """Have `worker` get and keep a part of `owner`, this worker. Raises PeerError."""
        address = self._addresses().get(worker)
        if not address:
            raise PeerError(f"the address of worker {worker} is not known")
        timeout = aiohttp.ClientTimeout(total=REPLICA_SECONDS, sock_connect=2.0)
        url = f"http://{address}/v1/replica/{owner}"
        try:
            body = codec.dumps(part)
            async with self._client().post(url, data=body, headers=self._headers, timeout=timeout) as response:
                text = await response.text()
                if response.status != 204:
                    raise PeerError(f"worker {worker}: {text[:200]}")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise PeerError(f"worker {worker} does not answer: {error!r}") from None

    async def _get(
        self, worker: int, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Asked again for a while when the agent does not answer; a refusal is final."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            try:
                return await self._get_once(worker, path, headers)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise PeerError(f"worker {worker} does not answer: {error!r}") from None
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _get_once(
        self, worker: int, path: str, headers: Mapping[str, str] | None
    ) -> tuple[bytes, Mapping[str, str]]:
        address = self._addresses().get(worker)
        if not address:
            raise aiohttp.ClientConnectionError("its address is not known")
        timeout = aiohttp.ClientTimeout(total=30.0, sock_connect=2.0)
        wanted = {**self._headers, **(headers or {})}
        async with self._client().get(f"http://{address}{path}", headers=wanted, timeout=timeout) as response:
            data = await response.read()
            if response.status not in (200, 206):
                raise PeerError(f"worker {worker}: {response.status} {data.decode(errors='replace')[:200]}")
            return data, dict(response.headers)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session
