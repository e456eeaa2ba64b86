"""Which save is due, one at a time; what checkpoints there are; what the ranks and the coordinator hear of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable

from lastwords.agent.calls import Calls
from lastwords.agent.offload import Offload
from lastwords.agent.peers import PeerError, Peers
from lastwords.agent.persist import METADATA_SECONDS, NonFiniteError, NotSavedError, Save, SaveError, SaveOrder
from lastwords.agent.worker import Worker
from lastwords.protocol import wire
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import CheckpointInfo, RunState, StorageReport
from lastwords.storage import adopting, retention
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import CheckpointError, ClaimedError, JobCheckpoints

log = logging.getLogger("lastwords.agent")

_RELOAD_SECONDS = 30.0
_ADOPT_SECONDS = 24 * 3600.0
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_SUPERSEDED_SECONDS = 10.0
"""A save that has waited so long for other workers is given up when a newer one is due."""
_HOPELESS = 3
"""Ranks that are through do not wait for their last save after so many failures."""


class Saver:
    """`on_change` is called when the report has changed."""

    def __init__(
        self,
        worker: Worker,
        checkpoints: JobCheckpoints,
        offload: Offload,
        peers: Peers,
        on_change: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._peers = peers
        self.calls = Calls(worker, peers, on_change)
        self._checkpoints = checkpoints
        self._offload = offload
        self._on_change = on_change
        self._infos: dict[CheckpointId, CheckpointInfo] = {}
        self._loaded = False
        self._load_error = ""
        self._load_task: asyncio.Task[None] | None = None
        self._load_at = 0.0
        self._current: Save | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed: set[CheckpointId] = set()
        """Saves that are tried again only if the coordinator says so: not there any more, or periodic and failed."""
        self._non_finite: set[CheckpointId] = set()
        self._failed: dict[CheckpointId, tuple[int, float]] = {}
        self._failures_in_row = 0
        self._skipped = 0
        self._stopped = False
        self._began = 0.0
        self._error = ""
        self._persist_seconds = 0.0
        self._commit_seconds = 0.0

    def report(self) -> StorageReport:
        """For the coordinator."""
        return StorageReport(
            loaded=self._loaded,
            checkpoints=tuple(self._infos[i] for i in sorted(self._infos, key=retention.age)),
            persisting=self._current.order.id if self._current is not None else None,
            persisting_seconds=time.monotonic() - self._began if self._current is not None else 0.0,
            failures_in_row=self._failures_in_row,
            skipped=self._skipped,
            error=self._error or self._load_error,
            persist_seconds_last=self._persist_seconds,
            commit_seconds_last=self._commit_seconds,
        )

    def committed(self, step: int, attempt: int) -> bool:
        """Whether this checkpoint is known to be committed and whole."""
        info = self._infos.get(CheckpointId(step=step, attempt=attempt))
        return info is not None and not info.rejected

    def hopeless(self, step: int, attempt: int) -> bool:
        """Whether saving this has failed so often that nobody should wait for it."""
        return self._failed.get(CheckpointId(step=step, attempt=attempt), (0, 0.0))[0] >= _HOPELESS

    @property
    def idle(self) -> bool:
        """Whether no save is going on."""
        return self._current is None

    def free(self, slots: Iterable[tuple[int, int]]) -> None:
        """These (slot, rank) are about to be written: a save that reads one of them is given up."""
        if self._current is not None and self._current.pinned & set(slots):
            self._current.give_up()

    def reload(self) -> None:
        """Read the inventory again soon."""
        self._load_at = 0.0

    def reject(self, checkpoint: CheckpointId, reason: str) -> None:
        """A checkpoint turned out to be damaged: it is no candidate any more, here and now."""
        info = self._infos.get(checkpoint) or CheckpointInfo(id=checkpoint)
        self._infos[checkpoint] = dataclasses.replace(info, rejected=reason)

    def reconcile(self) -> None:
        """Begin what is due."""
        now = time.monotonic()
        if now >= self._load_at and (self._load_task is None or self._load_task.done()):
            self._load_at = now + _RELOAD_SECONDS
            self._load_task = asyncio.create_task(self._load())
        order = self._due(now)
        current = self._current
        if current is None:
            if order is not None:
                self._begin(order)
            return
        if current.order.chosen:
            self.calls.repeat(current.order.id)
        newest = self._worker.order.attempt if self._worker.order is not None else 0
        if current.order.id.attempt < newest and not self._is_wanted(current.order.id):
            current.give_up()
        if order is None:
            return
        if order.id == current.order.id:
            # The coordinator knows who is left to write.
            if order.ordered and (order.parts, order.workers) != (current.order.parts, current.order.workers):
                current.give_up()
            return
        waited = now - current.waiting_since if current.waiting_since is not None else 0.0
        called = order.chosen and current.order.chosen and not self.calls.leads
        if order.ordered or called or (waited > _SUPERSEDED_SECONDS and order.id > current.order.id):
            current.give_up()

    def save_now(self, order: SaveOrder) -> None:
        """Save this instead of whatever goes on."""
        if self._current is not None and self._current.order.id != order.id:
            self._current.give_up()
        elif self._current is None and not self.committed(order.id.step, order.id.attempt):
            self._begin(order)

    def gave_up_on_others(self, seconds: float) -> bool:
        """Give up a save in which for so long only other workers' parts have been missing; whether there was one."""
        current = self._current
        if current is None or current.waiting_since is None or time.monotonic() - current.waiting_since < seconds:
            return False
        current.give_up()
        return True

    async def stop(self) -> None:
        """End whatever goes on; threads that are stuck are left behind."""
        self._stopped = True
        if self._current is not None:
            self._current.give_up()
        await self.calls.stop()
        tasks = [task for task in (self._task, self._load_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- which ------------------------------------------------------------------------------------

    def _due(self, now: float) -> SaveOrder | None:
        for order in (self._ordered(), self._final(), self._periodic()):
            if order is None or order.id in self._non_finite or order.id in self._infos:
                continue
            if order.id in self._closed and not order.ordered:
                continue
            if now >= self._failed.get(order.id, (0, 0.0))[1]:
                return order
        return None

    def _is_wanted(self, checkpoint: CheckpointId) -> bool:
        order = self._ordered()
        return order is not None and order.id == checkpoint

    def _ordered(self) -> SaveOrder | None:
        order = self._worker.order
        if order is None or order.persist is None:
            return None
        wanted = order.persist
        return SaveOrder(
            id=CheckpointId(step=wanted.step, attempt=wanted.attempt),
            kind=wanted.kind,
            parts=wanted.parts,
            record_ranks=wanted.record_ranks,
            lineage=order.lineage,
            topology=order.topology,
            workers=tuple(sorted({*map(order.topology.worker_of, wanted.parts), *order.peers, self._worker.number})),
            ordered=True,
        )

    def _final(self) -> SaveOrder | None:
        ranks = self._worker.ranks.values()
        steps = {rank.finished.step if rank.finished is not None else None for rank in ranks}
        step = next(iter(steps)) if len(steps) == 1 else None
        return self.of_all(step, "final") if step else None

    def _periodic(self) -> SaveOrder | None:
        ranks = list(self._worker.ranks.values())
        common = set.intersection(*(set(rank.snapshots) for rank in ranks)) if ranks else set()
        step = self.calls.choose(common)
        order = self.of_all(step, ranks[0].snapshots[step].persist_kind) if step is not None else None
        return dataclasses.replace(order, chosen=True) if order is not None else None

    def of_all(self, step: int, kind: str) -> SaveOrder | None:
        """A save of the attempt in force that counts on all ranks, when this worker's parts of it are READY."""
        worker, order = self._worker, self._worker.order
        if order is None or order.attempt != worker.attempt or order.run is not RunState.RUNNING:
            return None
        if any(worker.volume.find_part(rank, step, worker.attempt) is None for rank in worker.own_ranks):
            return None
        world = tuple(range(worker.topology.world))
        return SaveOrder(
            id=CheckpointId(step=step, attempt=worker.attempt),
            kind=kind,
            parts=world,
            record_ranks=world,
            lineage=order.lineage,
            topology=worker.topology,
            workers=tuple(range(worker.topology.workers)),
        )

    # -- one save ---------------------------------------------------------------------------------

    def _begin(self, order: SaveOrder) -> None:
        settings = self._worker.settings
        self._current = Save(
            order,
            settings.worker,
            volume=self._worker.volume,
            checkpoints=self._checkpoints,
            offload=self._offload,
            fetch_record=functools.partial(self._fetch_record, order),
            job_uid=settings.job_uid,
            write_seconds=settings.save_seconds,
            others_seconds=settings.others_seconds,
        )
        self._task = asyncio.create_task(self._run(self._current))
        if order.chosen:
            self.calls.repeat(order.id)
        self._on_change()

    async def _fetch_record(self, order: SaveOrder, rank: int) -> bytes | None:
        """The small record of an own rank from the neighbour, which keeps a copy."""
        neighbour = (self._worker.number + 1) % order.topology.workers
        if neighbour == self._worker.number or neighbour not in order.workers:
            return None
        try:
            body, _ = await self._peers.record(neighbour, rank, order.id.step, order.id.attempt)
        except PeerError as error:
            log.warning("the record of rank %d: %s", rank, error)
            return None
        return body

    async def _run(self, save: Save) -> None:
        began = self._began = time.monotonic()
        try:
            made = await save.run()
        except NonFiniteError as error:
            self._non_finite.add(save.order.id)
            self._worker.notice("non-finite", str(error))
        except NotSavedError as error:
            log.info("step %d is not saved: %s", save.order.id.step, error)
            self._skipped += 1
            if not save.order.ordered:
                self._closed.add(save.order.id)
            elif not save.given_up:
                self._note_failure(save, str(error))
        except SaveError as error:
            self._note_failure(save, str(error))
        except Exception as error:
            log.exception("saving failed")
            self._note_failure(save, repr(error))
        else:
            ended = time.monotonic()
            self._persist_seconds = (save.waiting_since or ended) - began
            self._commit_seconds = ended - began
            self._failures_in_row, self._error = 0, ""
            self._failed.pop(save.order.id, None)
            info = CheckpointInfo(id=made.id, kind=made.plan.kind, finite=made.finite, nbytes=made.nbytes)
            self._infos[made.id] = info
            self._tell_ranks(wire.Persisted(step=made.id.step, attempt=made.id.attempt))
            if save.own_commit:
                await self._retain()
        finally:
            self._current = None
            self._on_change()

    def _note_failure(self, save: Save, error: str) -> None:
        checkpoint = save.order.id
        count = self._failed.get(checkpoint, (0, 0.0))[0] + 1
        pause = _RETRY_SECONDS[min(count, len(_RETRY_SECONDS)) - 1]
        self._failed[checkpoint] = (count, time.monotonic() + pause)
        if not save.order.ordered and save.order.kind == "periodic":
            self._closed.add(checkpoint)
        self._failures_in_row += 1
        self._error = error
        log.warning("saving step %d failed: %s", checkpoint.step, error)
        self._tell_ranks(wire.Persisted(step=checkpoint.step, attempt=checkpoint.attempt, error=error))

    def _tell_ranks(self, message: wire.Persisted) -> None:
        for rank in self._worker.ranks.values():
            rank.send(message)

    async def _retain(self) -> None:
        order = self._worker.order
        if order is None:
            return
        try:
            keep = retention.Keep(last=order.keep_last, every=order.keep_every)
            retain = functools.partial(self._checkpoints.retain, keep, order.in_use)
            gone = await self._offload.run(retain, self._worker.settings.save_seconds)
        except StorageError as error:
            log.warning("old checkpoints could not be removed: %s", error)
            return
        for checkpoint in gone:
            self._infos.pop(checkpoint, None)

    # -- inventory --------------------------------------------------------------------------------

    async def _load(self) -> None:
        known = set(self._infos)
        try:
            await self._adopt()
            infos = await self._offload.run(lambda: self._read(known), METADATA_SECONDS)
        except ClaimedError as error:
            self._load_error = str(error)
            self._worker.notice("storage-claimed", str(error), fatal=True)
        except adopting.NoSourceError as error:
            self._load_error = str(error)
            self._worker.notice("resume-from", str(error), fatal=True)
        except (StorageError, CheckpointError) as error:
            self._load_error = str(error)
            self._load_at = time.monotonic() + 5.0
        else:
            self._loaded = True
            # What was committed while the list was read stays.
            self._infos = {info.id: info for info in infos} | {
                i: info for i, info in self._infos.items() if i not in known
            }
        self._on_change()

    async def _adopt(self) -> None:
        """Begin with another job's checkpoint: before this worker has said what there is, the job does not start."""
        settings = self._worker.settings
        if self._loaded or not settings.resume_from or settings.worker != 0:
            return

        def copy() -> CheckpointId | None:
            self._checkpoints.claim(settings.job_uid)
            return adopting.adopt(self._checkpoints, settings.resume_from, lambda: self._stopped)

        found = await self._offload.run(copy, _ADOPT_SECONDS)
        if found is not None:
            text = f"the job begins with {found.folder} of {settings.resume_from}"
            self._worker.notice("resumed-from", text)

    def _read(self, known: set[CheckpointId]) -> list[CheckpointInfo]:
        self._load_error = ""
        try:
            self._checkpoints.claim(self._worker.settings.job_uid)
        except ClaimedError:
            raise
        except StorageError as error:
            # Nothing can be written: what is there may still be read, unless it is another job's.
            self._load_error = str(error)
            self._checkpoints.check_owner(self._worker.settings.job_uid)
        in_use = self._worker.order.in_use if self._worker.order is not None else ()
        return self._checkpoints.list_checkpoints({*known, *in_use})
