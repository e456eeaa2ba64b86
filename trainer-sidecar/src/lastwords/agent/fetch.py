"""
What an agent gives to the agents of other workers: parts of its memory volume, small records, its layout.

It also takes the small records of one neighbour, so that the loss of a whole worker does not lose them.

    GET  /v1/layout                                   layout.json
    GET  /v1/parts?step=S&attempt=A                   READY parts: [{"slot", "sequence", "record"}]
    GET  /v1/parts/{slot}/{rank}?sequence=Q           bytes of a part (Range), 409 when it has changed
    GET  /v1/records/{rank}/{step}?attempt=A          a small record; header X-Lastwords-Provisional
    POST /v1/neighbour/{rank}?slot=S                  a small record to keep (S: that of the snapshot there)
    POST /v1/replica/{worker}                         a part of that worker to get and keep; answered when it is here
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence

from aiohttp import web

from lastwords.agent.peers import PROVISIONAL, PeerError
from lastwords.agent.volume import Part, Volume
from lastwords.protocol import codec, snapshots
from lastwords.protocol import volume as names

_MAX_RECORD_BYTES = 256 * 1024 * 1024


class FetchServer:
    """Serves `volume` to whoever knows the job's token. `ranks()`: those whose parts may be here."""

    def __init__(
        self,
        volume: Volume,
        token: str,
        ranks: Callable[[], Sequence[int]],
        on_change: Callable[[], None],
        keep: Callable[[int, Part], Awaitable[None]],
    ) -> None:
        """`keep(worker, part)` gets a replica."""
        self._keep = keep
        self._volume = volume
        self._token = f"Bearer {token}"
        self._ranks = ranks
        self._on_change = on_change
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self, host: str, more: Iterable[web.RouteDef]) -> None:
        """Listen on a port that the kernel chooses. `more`: what else other workers ask of this agent."""
        app = web.Application(middlewares=[self._authorise], client_max_size=_MAX_RECORD_BYTES)
        app.add_routes(
            [
                web.get("/v1/layout", self._layout),
                web.get("/v1/parts", self._list_parts),
                web.get("/v1/parts/{slot:\\d+}/{rank:\\d+}", self._part),
                web.get("/v1/records/{rank:\\d+}/{step:\\d+}", self._record),
                web.post("/v1/neighbour/{rank:\\d+}", self._neighbour),
                web.post("/v1/replica/{worker:\\d+}", self._replica),
            ]
        )
        app.add_routes(more)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        port = self._runner.addresses[0][1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """End all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPUnauthorized(text="the token is not that of this job")
        return await handler(request)

    async def _layout(self, request: web.Request) -> web.Response:
        table = self._volume.table()
        if table is None:
            raise web.HTTPNotFound(text="no layout yet")
        return web.Response(body=codec.dumps(table), content_type="application/json")

    async def _list_parts(self, request: web.Request) -> web.Response:
        step, attempt = _number(request, "step"), _number(request, "attempt")
        found = [self._volume.find_part(rank, step, attempt) for rank in self._ranks()]
        return web.json_response([codec.to_plain(part) for part in found if part is not None])

    async def _part(self, request: web.Request) -> web.Response:
        slot, rank = int(request.match_info["slot"]), int(request.match_info["rank"])
        part = self._volume.part(slot, rank)
        if part is None or part.sequence != _number(request, "sequence"):
            raise web.HTTPConflict(text="the part has changed")
        begin, end = self._range(request, part)
        file = os.open(self._volume.path(names.part(slot, rank)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(file, end - begin, begin)
        finally:
            os.close(file)
        if len(data) != end - begin or not self._volume.unchanged(part):
            raise web.HTTPConflict(text="the part has changed")
        return web.Response(status=206, body=data, content_type="application/octet-stream")

    @staticmethod
    def _range(request: web.Request, part: Part) -> tuple[int, int]:
        """Begin and end of the bytes wanted, never more than one block."""
        try:
            wanted = request.http_range
        except ValueError:
            raise web.HTTPRequestRangeNotSatisfiable(text="bad Range header") from None
        begin = wanted.start or 0
        end = part.record.file_bytes if wanted.stop is None else wanted.stop
        if begin < 0 or begin >= end or end > part.record.file_bytes:
            raise web.HTTPRequestRangeNotSatisfiable(text="outside of the part")
        return begin, min(end, begin + snapshots.BLOCK_BYTES)

    async def _record(self, request: web.Request) -> web.Response:
        rank, step = int(request.match_info["rank"]), int(request.match_info["step"])
        record = self._volume.find_record(self._ranks(), rank, step, _number(request, "attempt"))
        if record is None:
            raise web.HTTPNotFound(text=f"no record of rank {rank} at step {step}")
        headers = {PROVISIONAL: "1" if record.head.provisional else "0"}
        return web.Response(body=record.body, headers=headers, content_type="application/octet-stream")

    async def _neighbour(self, request: web.Request) -> web.Response:
        slot = _number(request, "slot") if "slot" in request.query else None
        if not self._volume.keep_neighbour(await request.read(), slot):
            raise web.HTTPBadRequest(text="not a small record")
        self._on_change()
        return web.Response(status=204)

    async def _replica(self, request: web.Request) -> web.Response:
        try:
            part = codec.loads(Part, await request.read())
            await self._keep(int(request.match_info["worker"]), part)
        except codec.DecodeError:
            raise web.HTTPBadRequest(text="not a part") from None
        except (PeerError, OSError) as error:
            raise web.HTTPConflict(text=str(error)) from None
        self._on_change()
        return web.Response(status=204)


def _number(request: web.Request, name: str) -> int:
    try:
        return int(request.query[name])
    except (KeyError, ValueError):
        raise web.HTTPBadRequest(text=f"the query needs {name}=<number>") from None
