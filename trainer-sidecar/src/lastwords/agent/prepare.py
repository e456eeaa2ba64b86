"""Gets what the ranks of this worker need for a restore plan into its own memory, and says where it is."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Mapping

from lastwords.agent import fetching, stored
from lastwords.agent.offload import Offload
from lastwords.agent.peers import PeerError, Peers
from lastwords.agent.persist import SLOWEST_BYTES_PER_SECOND
from lastwords.agent.volume import Record, Volume, parse_record
from lastwords.protocol import manifest, snapshots, wire
from lastwords.protocol import volume as names
from lastwords.protocol.manifest import CheckpointId, Manifest, StoredFile
from lastwords.protocol.messages import RestorePlan, RestoreSource
from lastwords.protocol.pieces import Topology
from lastwords.storage.base import StorageError
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints

VERIFY_SECONDS = 600.0


class PrepareError(Exception):
    """The worker cannot get what its ranks need; the text says what is missing and why."""


class Preparation:
    """One restore plan for one worker."""

    def __init__(
        self,
        plan: RestorePlan,
        worker: int,
        topology: Topology,
        *,
        volume: Volume,
        peers: Peers,
        offload: Offload,
        checkpoints: JobCheckpoints,
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._topology = topology
        self._ranks = topology.ranks_of(worker)
        self._volume = volume
        self._peers = peers
        self._offload = offload
        self._checkpoints = checkpoints

    async def run(self) -> dict[int, wire.RestoreOrder]:
        """What each rank of the worker restores. Raises PrepareError."""
        try:
            if self._plan.source is RestoreSource.MEMORY:
                return await self._from_memory()
            if self._plan.source is RestoreSource.CHECKPOINT:
                return await self._from_checkpoint()
        except (PeerError, StorageError, CheckpointError, OSError) as error:
            raise PrepareError(str(error)) from error
        return {rank: wire.RestoreOrder(source=RestoreSource.BEGINNING) for rank in self._ranks}

    # -- from memory ------------------------------------------------------------------------------

    async def _from_memory(self) -> dict[int, wire.RestoreOrder]:
        files = {rank: await self._part(rank) for rank in self._ranks}
        orders = {}
        for rank in self._ranks:
            own = await self._record(rank)
            shared = None if own is not None and not own.head.provisional else await self._shared_record(rank)
            others = [file for other, file in files.items() if other != rank]
            orders[rank] = wire.RestoreOrder(
                source=self._plan.source,
                step=self._plan.step,
                attempt=self._plan.attempt,
                files=(files[rank], *others),
                chunks_path=self._volume.path(names.LAYOUT),
                record=self._record_file(f"restore-{rank:05d}.record", own),
                shared_record=self._record_file(f"restore-{rank:05d}.shared", shared),
            )
        return orders

    async def _part(self, rank: int) -> wire.RestoreFile:
        """The rank's part in this volume, from here or from where the plan says."""
        plan, volume = self._plan, self._volume
        part = volume.find_part(rank, plan.step, plan.attempt)
        if part is not None:
            found = part
            bad = await self._offload.run(lambda: volume.bad_block(found), VERIFY_SECONDS, "the memory volume")
            if bad is not None:
                volume.discard(part)
                problem = f"block {bad} of the part of rank {rank} at step {plan.step} is damaged (checksum)"
                if plan.parts.get(rank, self._worker) == self._worker:
                    raise PrepareError(problem)
                part = None
        if part is None:
            source = plan.parts.get(rank, self._worker)
            if source == self._worker:
                raise PrepareError(f"the part of rank {rank} at step {plan.step} is not in the memory volume any more")
            record = await self._record(rank)
            fetch = fetching.PartFetch(volume, self._peers, self._offload, source, self._topology)
            part = await fetch.run(rank, plan.step, plan.attempt, record.body if record is not None else None)
        path = volume.path(names.part(part.slot, rank))
        # Once for all ranks of the worker: nobody writes to it until they have read it.
        return wire.RestoreFile(path=path, blocks=part.record.blocks, nbytes=part.record.file_bytes, checked=True)

    async def _record(self, rank: int) -> Record | None:
        """The rank's small record, or None when the plan says that it is reseeded."""
        plan = self._plan
        found = self._volume.find_record(self._ranks, rank, plan.step, plan.attempt)
        source = plan.records.get(rank)
        if found is not None or source is None:
            return found
        if source == self._worker:
            raise PrepareError(f"the small record of rank {rank} at step {plan.step} is not here any more")
        return await self._fetched_record(source, rank)

    async def _fetched_record(self, worker: int, rank: int) -> Record:
        body, _ = await self._peers.record(worker, rank, self._plan.step, self._plan.attempt)
        record = parse_record(body)
        if record is None or (record.head.rank, record.head.step) != (rank, self._plan.step):
            raise PrepareError(f"worker {worker} gave something that is not the small record of rank {rank}")
        return record

    async def _shared_record(self, rank: int) -> Record:
        """A final record of any rank, for what all ranks share."""
        plan = self._plan
        for record in self._volume.records(self._ranks):
            head = record.head
            if (head.step, head.attempt) == (plan.step, plan.attempt) and not head.provisional:
                return record
        for other, worker in plan.records.items():
            if worker != self._worker and other != rank:
                record = await self._fetched_record(worker, other)
                if not record.head.provisional:
                    return record
        raise PrepareError(f"no rank has a final record of step {plan.step}")

    def _record_file(self, name: str, record: Record | None) -> wire.RestoreFile | None:
        """The record as a file of its own, since its area will be written again."""
        if record is None:
            return None
        path = self._volume.path(name)
        with open(f"{path}.new", "wb") as file:
            file.write(record.body)
        os.rename(f"{path}.new", path)
        return wire.RestoreFile(path=path, blocks=snapshots.block_checksums(record.body), nbytes=len(record.body))

    # -- from a checkpoint ------------------------------------------------------------------------

    async def _from_checkpoint(self) -> dict[int, wire.RestoreOrder]:
        checkpoint = CheckpointId(step=self._plan.step, attempt=self._plan.attempt)
        found = await self._offload.run(lambda: self._checkpoints.read_manifest(checkpoint), VERIFY_SECONDS)
        if found is None:
            raise PrepareError(f"the checkpoint {checkpoint.folder} is not there (any more)")
        try:
            heads = await self._offload.run(lambda: self._records(found), VERIFY_SECONDS)
            await asyncio.gather(*map(functools.partial(self._verify, checkpoint), self._share(found)))
        except CheckpointError as error:
            reason = str(error)
            try:
                await self._offload.run(lambda: self._checkpoints.reject(checkpoint, reason), 30.0)
            except StorageError:
                pass  # a storage that cannot be written: this agent's own list has it
            raise
        here = self._checkpoints.local_path(checkpoint, manifest.MANIFEST)
        if here is None:
            lay_out = functools.partial(stored.lay_out, self._volume.path(names.STORED), self._checkpoints, found)
            await self._offload.run(lay_out, VERIFY_SECONDS)
            here = os.path.join(self._volume.path(names.STORED), manifest.MANIFEST)
        files = tuple(self._data(checkpoint, part.data) for part in found.parts if part.data is not None)
        records = {part.rank: part.record for part in found.parts if part.record is not None}
        final = [rank for rank, provisional in sorted(heads.items()) if not provisional]
        if not final:
            raise PrepareError(f"the checkpoint {checkpoint.folder} has no final record")
        orders = {}
        for rank in self._ranks:
            own = records.get(rank)
            shared = None if rank in final else records[final[0]]
            orders[rank] = wire.RestoreOrder(
                source=self._plan.source,
                step=self._plan.step,
                attempt=self._plan.attempt,
                files=files,
                chunks_path=here,
                record=self._stored(checkpoint, own) if own is not None else None,
                shared_record=self._stored(checkpoint, shared) if shared is not None else None,
                other_records=tuple(self._stored(checkpoint, file) for other, file in records.items() if other != rank),
            )
        return orders

    def _share(self, found: Manifest) -> list[StoredFile]:
        """
        Data files that this worker checks.

        The ranks check what they read once more; this is so that a damaged file is known before they start.
        """
        return [part.data for part in found.parts if part.data is not None][self._worker :: self._topology.workers]

    async def _verify(self, checkpoint: CheckpointId, file: StoredFile) -> None:
        verify = functools.partial(self._checkpoints.verify_file, checkpoint, file)
        problems = await self._offload.run(verify, VERIFY_SECONDS + file.nbytes / SLOWEST_BYTES_PER_SECOND)
        if problems:
            raise CheckpointError(problems[0])

    def _records(self, found: Manifest) -> Mapping[int, bool]:
        """Check all small records, and keep them here if the ranks cannot open them; whether each is provisional."""
        heads = {}
        for part in found.parts:
            if part.record is not None:
                body = self._checkpoints.read_file(found.id, part.record)
                record = parse_record(body)
                if record is None:
                    raise CheckpointError(f"{found.id.folder}/{part.record.name}: not a small record")
                if self._checkpoints.local_path(found.id, part.record.name) is None:
                    stored.keep(self._volume.path(names.STORED), part.record.name, body)
                heads[part.rank] = record.head.provisional
        return heads

    def _stored(self, checkpoint: CheckpointId, file: StoredFile) -> wire.RestoreFile:
        path = self._checkpoints.local_path(checkpoint, file.name)
        if path is None:
            path = os.path.join(self._volume.path(names.STORED), file.name)
        return wire.RestoreFile(path=path, blocks=file.blocks, nbytes=file.nbytes)

    def _data(self, checkpoint: CheckpointId, file: StoredFile) -> wire.RestoreFile:
        found = self._stored(checkpoint, file)
        if self._checkpoints.local_path(checkpoint, file.name) is not None:
            return found
        return dataclasses.replace(found, served=self._checkpoints.path(checkpoint, file.name))


async def cancel(task: asyncio.Task[None] | None) -> None:
    """End a preparation that is not wanted any more."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
