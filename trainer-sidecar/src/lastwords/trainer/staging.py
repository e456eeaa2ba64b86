"""
Snapshots: the copy of this rank's part into a slot, beside the next forward and backward.

The order inside of a slot: invalidate the commit area, copy, compare version counters and update counter with those
of the boundary, let the update go on, make checksums *from the slot*, commit. A kill at any line leaves either the
old commit area, an invalid one, or the new one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time

from lastwords.protocol import areas, codec, environment, snapshots, wire
from lastwords.protocol.control import Word
from lastwords.protocol.pieces import PieceTable
from lastwords.protocol.snapshots import SlotRecord
from lastwords.trainer import copying, faultpoints, slots
from lastwords.trainer.agreement import Agreement
from lastwords.trainer.collect import State
from lastwords.trainer.floors import Floors
from lastwords.trainer.gate import WATCH_SECONDS, Gate
from lastwords.trainer.replication import Replication
from lastwords.trainer.session import Session

log = logging.getLogger("lastwords")

FIRST_WAIT_SECONDS = 60.0
"""How long a first snapshot waits for the other ranks' layouts before training goes on without."""
MUST_WAIT_SECONDS = 60.0
"""How long a final or requested snapshot waits for a free slot."""
BEGIN_WAIT_SECONDS = 0.002
"""How often the optimizer looks again whether a copy that has not begun still can."""


@dataclasses.dataclass(frozen=True)
class Rest:
    """The state as it rests between a boundary and the next update."""

    step: int
    counter: int
    versions: tuple[int, ...]
    record: bytes
    state: State
    layout_number: int

    def untouched(self, gate: Gate) -> bool:
        """
        Whether no update has begun on the device and nobody has written the tensors behind its back since the boundary.

        The latter can be told only as long as Python has not queued the next update either.
        """
        if gate.counter != self.counter:
            return False
        return gate.ordered_counter != self.counter or self.state.versions() == self.versions


@dataclasses.dataclass
class Job:
    """One snapshot. `must`: it is not skipped for want of time."""

    rest: Rest
    persist: bool
    kind: str
    must: bool
    started: bool = False
    """A slot is being taken."""
    cancelled: bool = False
    """The state is about to change: only a copy that has a slot goes on."""
    ok: bool = False
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class Stager:
    """Takes one snapshot after the other on its own thread."""

    def __init__(self, session: Session, floor: tuple[int, int]) -> None:
        self._session = session
        self._rank = session.rank
        topology = session.topology
        local = session.rank % topology.processes_per_worker
        self._pins = slots.Pins(session.folder, local, topology.processes_per_worker)
        self._processes = topology.processes_per_worker
        self.lock = threading.Lock()
        """Held while slots are written: by a snapshot or by a live copy."""
        self.floor = floor
        """(step, attempt) whose slot is not overwritten."""
        count = session.welcome.slots if session.welcome else 2
        self._slots = [slots.Slot(session.folder, index, session.rank) for index in range(count)]
        self._usable = len(self._slots)
        self.floors = Floors(session.store_client, session.rank, topology.world, self._new_floor)
        self._replication = Replication(session, self.floors)
        self.agreement = Agreement(session, self._prepare)
        self._part: tuple[State, PieceTable, int, copying.PartCopy] | None = None
        self.checks_changes = True
        """Tests switch this off, to show what would happen."""
        self._job: Job | None = None
        self._current: Job | None = None
        """What the thread is at, its checksums included."""
        self._wanted = threading.Condition()
        self._queue: list[Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lastwords-stager", daemon=True)
        self._thread.start()

    # -- main thread ------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Take this snapshot as soon as possible."""
        self._job = job
        with self._wanted:
            self._queue.append(job)
            self._wanted.notify()

    def before_update(self) -> None:
        """The state is about to change: wait for a copy that has begun or can begin at once, drop any other."""
        job = self._job
        if job is None or job.copied.is_set():
            return
        table = self.agreement.table(job.rest.layout_number)
        if table is None and not job.must:
            self.agreement.wait(job.rest.layout_number, FIRST_WAIT_SECONDS)
        elif not job.must:
            # The thread may just not have been scheduled since the boundary: that alone is no reason to drop it.
            while not job.copied.is_set():
                with self._wanted:
                    busy = self._current is not None and self._current is not job
                    if not job.started and (busy or self._free_slot() is None):
                        job.cancelled = True
                        self.floors.nudge()
                        return
                job.copied.wait(BEGIN_WAIT_SECONDS)
        job.copied.wait()

    def wait_copied(self) -> None:
        """Wait until the newest snapshot has been copied (or dropped)."""
        if self._job is not None:
            self._job.copied.wait()

    def close(self) -> None:
        """End the threads; a snapshot that goes on is finished."""
        self._closed = True
        with self._wanted:
            self._wanted.notify()
        self._thread.join(timeout=5.0)
        self.agreement.close()
        self.floors.close()

    # -- memory -----------------------------------------------------------------------------------

    def _prepare(self, table: PieceTable) -> None:
        """Sizes are known: see how many slots fit, and allocate them. On the exchange's thread."""
        header, places = copying.part_places(table, self._rank)
        need = max((end for _, end in places.values()), default=len(header))
        limit_text = os.environ.get(environment.MEMORY_LIMIT_BYTES, "")
        copies = 1 + (self._session.welcome.replicas if self._session.welcome else 0)
        limit = int(limit_text) // (self._processes * copies) if limit_text else None
        fits, room = slots.slots_that_fit(self._session.folder, self._slots, need, limit)
        self._tell_memory(fits, need, room)
        self._usable = fits
        with self.lock:
            for slot in self._slots[:fits]:
                committed = slot.committed()
                if committed is None or committed.file_bytes == need:
                    try:
                        # Its pages are mapped at the first copy: after a restore the first step goes on beside this.
                        data = slot.resize(need)
                        self._session.gate.device.pin(data.address, data.nbytes)
                    except slots.NoMemoryError as error:
                        self._usable = slot.slot
                        self._tell_memory(slot.slot, need, room, str(error))
                        break

    def _tell_memory(self, fits: int, need: int, room: int, why: str = "") -> None:
        wanted = len(self._slots)
        if fits >= wanted:
            return
        mib = 1 << 20
        figures = (
            f"{wanted} slots of {need / mib:.0f} MiB are wanted for rank {self._rank}, {room / mib:.0f} MiB are there"
        )
        if fits == 0:
            text = (
                f"too little memory: {figures}. Give the memory volume at least {need * wanted / mib:.0f} MiB per rank"
            )
            self._session.send(wire.RankNotice(code="no-memory", text=f"{text} {why}".strip(), fatal=True))
        else:
            text = f"{figures}: only {fits} used, so a fault during a snapshot falls back to storage"
            self._session.send(wire.RankNotice(code="little-memory", text=f"{text} {why}".strip()))

    def part_copy(self, state: State, table: PieceTable, rank: int) -> copying.PartCopy:
        """Copies for the part of `rank`; the own one is kept. Raises KeyError, see PartCopy."""
        known = self._part
        if known is not None and known[0] is state and known[1] is table and known[2] == rank:
            return known[3]
        part = copying.PartCopy(table, rank, state.stable)
        if rank == self._rank:
            self._part = (state, table, rank, part)
        return part

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._current = self._queue.pop(0)
            try:
                self._take(job)
            except Exception as error:
                log.exception("lastwords: the snapshot of step %d failed", job.rest.step)
                self._session.send(wire.RankNotice(code="snapshot-failed", text=f"step {job.rest.step}: {error}"))
            finally:
                if not job.ok:
                    self.floors.void(job.rest.step)
                self._current = None
                job.copied.set()
                job.done.set()

    def _take(self, job: Job) -> None:
        table = self.agreement.wait(job.rest.layout_number, MUST_WAIT_SECONDS if job.must else FIRST_WAIT_SECONDS)
        if table is None or self._usable == 0:
            self._count(Word.SNAPSHOTS_SKIPPED)
            return
        part = self.part_copy(job.rest.state, table, self._rank)
        if not self._device_is_at(job):
            self._count(Word.SNAPSHOTS_SKIPPED)
            return
        slot = self._invalidated_slot(job)
        if slot is None:
            self._count(Word.SNAPSHOTS_SKIPPED)
            return
        try:
            self._fill(job, table, part, slot)
        finally:
            self.lock.release()

    def _device_is_at(self, job: Job) -> bool:
        """Wait until the device has come to the boundary. No lock is held: it may hang, and a live copy be wanted."""
        gate = self._session.gate
        while gate.counter < job.rest.counter and not self._closed:
            time.sleep(WATCH_SECONDS)
        return not self._closed

    def _fill(self, job: Job, table: PieceTable, part: copying.PartCopy, slot: slots.Slot) -> None:
        began = time.monotonic_ns()
        faultpoints.begin("snapshot_copy")
        data = slot.resize(part.nbytes)
        with self._session.gate.device.copying():
            part.run(data)
        unchanged = job.rest.untouched(self._session.gate)
        digests = None
        if self.agreement.needs_proof(table):
            digests = copying.content_digests(table, self._rank, job.rest.state.stable)
            unchanged = unchanged and job.rest.untouched(self._session.gate)
        faultpoints.end("snapshot_copy")
        job.copied.set()
        if not unchanged and self.checks_changes:
            self._count(Word.SNAPSHOTS_REJECTED)
            return
        if digests is not None:
            self.agreement.prove(table, job.rest.step, digests, self.floors.decision)
        self._session.put(Word.LAST_COPY_NS, time.monotonic_ns() - began)
        slot.write_record(job.rest.record)
        commit(slot, part, data, job.rest.step, self._session.attempt, table.generation)
        job.ok = True
        self._count(Word.SNAPSHOTS)
        self._session.send(
            wire.SnapshotReady(step=job.rest.step, slot=slot.slot, persist=job.persist, persist_kind=job.kind)
        )
        self._replication.ready(job.rest.step)

    def _invalidated_slot(self, job: Job) -> slots.Slot | None:
        """A slot that may be overwritten, invalid already, with `lock` held; None when the job has to be skipped."""
        deadline = time.monotonic() + MUST_WAIT_SECONDS
        while not self._closed:
            with self._wanted:
                if job.cancelled:
                    return None
                job.started = (target := self._free_slot()) is not None
            if target is not None:
                self.lock.acquire()
                # A live copy may have used the slot meanwhile, or the agent begun to read it.
                if self._is_free(target) and self._invalidate(target):
                    return target
                self.lock.release()
                job.started = False
            if time.monotonic() > deadline or (not job.must and self.floors.gone):
                return None
            self.floors.wait_change(0.005)
            self._replication.expire()
        return None

    def _invalidate(self, slot: slots.Slot) -> bool:
        if self._pins.pinned(slot.slot):
            return False
        areas.invalidate(slot.commit.view)
        if self._pins.pinned(slot.slot):
            # The agent pinned it in between; it looks at the sequence after pinning, and finds it whole again.
            areas.revalidate(slot.commit.view)
            return False
        return True

    def _free_slot(self) -> slots.Slot | None:
        free = [slot for slot in self._slots[: self._usable] if self._is_free(slot)]
        return min(free, key=_age, default=None)

    def _is_free(self, slot: slots.Slot) -> bool:
        if self._pins.pinned(slot.slot):
            return False
        record = slot.committed()
        if record is None or self._usable == 1:
            return True
        if (record.step, record.attempt) == self.floor:
            return False
        if record.attempt != self._session.attempt or record.step <= self.floor[0]:
            return True
        # Newer than the floor: others may be about to make it the floor, or have done so.
        return not self.floors.is_open(record.step) and not self.floors.gone

    def _new_floor(self, step: int) -> None:
        if step > self.floor[0] or self.floor[1] != self._session.attempt:
            self.floor = (step, self._session.attempt)
            self._session.put(Word.FLOOR_STEP, step + 1)

    def _count(self, word: Word) -> None:
        self._session.put(word, self._session.get(word) + 1)


def commit(
    slot: slots.Slot, part: copying.PartCopy, data: slots.Mapped, step: int, attempt: int, generation: int
) -> None:
    """Make checksums from the slot and write its commit area."""
    record = SlotRecord(
        step=step,
        attempt=attempt,
        rank=slot.rank,
        generation=generation,
        file_bytes=data.nbytes,
        blocks=snapshots.block_checksums(data.view),
        finite=copying.is_finite(part.copies, data.view),
    )
    areas.commit(slot.commit.view, codec.dumps(record))


def _age(slot: slots.Slot) -> tuple[int, int]:
    record = slot.committed()
    return (-1, slot.slot) if record is None else (record.step, slot.slot)
