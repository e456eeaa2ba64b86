"""The Checkpointer's work under a runner: snapshots in the memory volume, holds, live copies, restore by order."""

from __future__ import annotations

import os
import struct
import time

from lastwords.protocol import environment, wire
from lastwords.protocol.control import Phase, Word
from lastwords.protocol.messages import RestoreSource
from lastwords.trainer import device, faultpoints, hooks, restoring, slots
from lastwords.trainer.collect import Collector
from lastwords.trainer.hoststate import HostStateError
from lastwords.trainer.live import LiveCopier
from lastwords.trainer.neighbour import NeighbourRecords
from lastwords.trainer.parts import Parts, StateError
from lastwords.trainer.planning import Planner
from lastwords.trainer.reading import RestoreError, WrongModelError
from lastwords.trainer.recording import Recorder
from lastwords.trainer.session import Session
from lastwords.trainer.staging import Job, Rest, Stager

OVERLAP, MANUAL, BLOCKING = "overlap", "manual", "blocking"


class Protected:
    """One per process. The main thread calls everything here; the threads behind it have their own classes."""

    def __init__(self, session: Session, parts: Parts, collector: Collector, mode: str) -> None:
        self._session = session
        self._parts = parts
        self._mode = mode
        self._collector = collector
        self.step = 0
        self._rest: Rest | None = None
        self._rest_before: Rest | None = None
        """That of the boundary before: a device that Python is ahead of may still be there."""
        self._save_requested = False
        self._newest_job: Job | None = None
        self._finished = False
        self._boundary_ns = time.monotonic_ns()
        self._first_boundary = True
        self._layout_number = 0
        welcome = session.wait_welcome()
        self._order = welcome.restore
        records = slots.Records(session.folder, session.rank)
        self._recorder = Recorder(parts, collector, session.rank, session.attempt, records)
        self._planner = Planner(welcome.plan, session.topology.world, session.store_client)
        self._stager = Stager(session, (self._order.step, self._order.attempt))
        self._live = LiveCopier(session, self._stager, self._rest_of)
        self._hooks = hooks.UpdateHooks(parts.optimizers.values(), self._before_update)
        self._backwards = 0
        """Backward passes since the boundary, up to the first update."""
        self._usual_backwards = 1
        """How many there were in the step before."""
        self._early_ns = 0
        self._watched = hooks.BackwardHooks(
            (parameter for module in parts.modules.values() for parameter in module.parameters()),
            self._at_backward,
            self._at_last_gradient,
        )
        for module in parts.modules.values():
            self._watched.watch_outputs(module)
        self._neighbour = NeighbourRecords(session)
        session.gate.on_device(
            device.of(parameter for module in parts.modules.values() for parameter in module.parameters())
        )
        session.on(wire.NewPlan, self._planner.offer)
        session.before_end = self._script_ends

    # -- restore ----------------------------------------------------------------------------------

    def restore(self) -> int:
        """Carry out the agent's order; returns the step."""
        session, order = self._session, self._order
        session.set_phase(Phase("restore"))
        faultpoints.begin("restore")
        try:
            alone = session.topology.world == 1
            restored = restoring.restore(order, self._parts, self._collector, session.rank, alone=alone)
            self._stager.agreement.restored(restored)
            record = self._recorder.build(order.step, 0)
        except WrongModelError as error:
            self._give_up("wrong-model", str(error), fatal=True)
            raise
        except (StateError, HostStateError) as error:
            self._give_up("state", str(error), fatal=True)
            raise
        except RestoreError as error:
            self._give_up("restore-failed", str(error), fatal=False)
            raise
        if not restored.exact:
            session.send(wire.RankNotice(code="reseeded", text=restored.note))
        self.step = order.step
        if order.source is RestoreSource.CHECKPOINT:
            # From memory the record is there already, under the number of the attempt that wrote it.
            self._recorder.write(order.step, record)
        if order.source is not RestoreSource.BEGINNING:
            self._layout_number = self._stager.agreement.begin(self._collector.state.chunks)
            self._rest = self._resting(record)
        session.put(Word.PLAN_NUMBER, self._planner.plan.number)
        session.put(Word.FLOOR_STEP, self.step + 1 if self.step else 0)
        session.gate.pass_boundary(self.step)
        session.put(Word.RESTORED_NS, time.monotonic_ns())
        session.set_phase(Phase("first_step"))
        self._boundary_ns = time.monotonic_ns()
        faultpoints.end("restore")
        session.send(wire.Boundary(step=self.step))
        return self.step

    def _give_up(self, code: str, text: str, *, fatal: bool) -> None:
        self._session.send(wire.RankNotice(code=code, text=text, fatal=fatal))

    # -- one step ---------------------------------------------------------------------------------

    def _at_backward(self) -> None:
        """
        A backward pass begins: others may pass the boundary as soon as it has ended here.

        Of several in one step (gradient accumulation) only the last one has that effect, and only it is told of.
        """
        if self._session.gate.updating:
            return
        self._backwards += 1
        if self._backwards >= self._usual_backwards:
            began = time.monotonic_ns()
            if self._recorder.write_provisional(self.step + 1, self._session.get(Word.GENERATION), early=True):
                self._neighbour.offer(self.step + 1)
            self._early_ns = time.monotonic_ns() - began

    def _at_last_gradient(self) -> None:
        """Once this gradient has left, others may pass the boundary."""
        self._early_ns += self._neighbour.wait()

    def _before_update(self) -> None:
        """The first optimizer of the step is about to change the state."""
        gate = self._session.gate
        if gate.updating:
            return
        began = time.monotonic_ns()
        self._recorder.write_provisional(self.step + 1, self._session.get(Word.GENERATION), early=False)
        if self._mode != MANUAL:
            self._stager.before_update()
        self._stalled(time.monotonic_ns() - began + self._early_ns)
        self._early_ns = 0
        gate.begin_update(self.step)

    def step_done(self, *, last: bool = False) -> None:
        """The boundary. `last`: the loop ends here, the final snapshot follows."""
        session, step = self._session, self.step + 1
        session.gate.before_boundary(self.step)
        session.gate.let_device_come_to(self.step)
        began = time.monotonic_ns()
        faultpoints.begin("boundary")
        self._hooks.reset()
        self._watched.reset()
        self._usual_backwards, self._backwards = max(1, self._backwards), 0
        self._refresh()
        record = self._recorder.build(step, session.get(Word.GENERATION))
        self._recorder.write(step, record)
        self.step = step
        # Before STEP shows it: whoever asks for a live copy of this step must find it.
        self._rest_before, self._rest = self._rest, self._resting(record)
        session.gate.pass_boundary(step)
        session.put(Word.BOUNDARY_NS, began)
        session.put(Word.STEP_NS, began - self._boundary_ns)
        self._boundary_ns = began
        if self._first_boundary:
            self._first_boundary = False
            session.put(Word.FIRST_STEP_NS, began)
            session.set_phase(Phase("training"))
        session.send(wire.Boundary(step=step, foretold=self._recorder.foretold))
        self._planner.settle(step)
        session.put(Word.PLAN_NUMBER, self._planner.plan.number)
        faultpoints.end("boundary")
        self._snapshot(last)
        self._stalled(time.monotonic_ns() - began, first=True)

    def _refresh(self) -> None:
        """See whether the layout is another one now."""
        try:
            if not self._collector.refresh() and self._layout_number:
                return
        except StateError as error:
            self._give_up("state", str(error), fatal=True)
            raise
        self._layout_number = self._stager.agreement.begin(self._collector.state.chunks)

    def _snapshot(self, last: bool) -> None:
        plan, requested = self._planner.plan, self._save_requested
        self._save_requested = False
        stops = plan.stop_after == self.step
        if last or not (plan.snapshots(self.step) or requested):
            return
        kind = "requested" if requested else "last-words" if stops else "periodic"
        self._submit(persist=plan.persists(self.step) or requested, kind=kind, must=requested or stops)
        if self._mode == BLOCKING:
            self._stager.wait_copied()

    def _submit(self, *, persist: bool, kind: str, must: bool) -> Job:
        assert self._rest is not None
        job = Job(rest=self._rest, persist=persist, kind=kind, must=must)
        self._stager.submit(job)
        self._newest_job = job
        return job

    def _resting(self, record: bytes) -> Rest:
        state = self._collector.state
        counter = self._session.gate.ordered_counter
        counter += counter & 1
        return Rest(self.step, counter, state.versions(), record, state, self._layout_number)

    def _rest_of(self, step: int) -> Rest | None:
        """The state at the last boundary or the one before."""
        return next((rest for rest in (self._rest, self._rest_before) if rest is not None and rest.step == step), None)

    def _stalled(self, nanoseconds: int, *, first: bool = False) -> None:
        """Boundary (`first`) and the wait before the next update make up the stall of a step."""
        session = self._session
        session.put(Word.STALL_NS_TOTAL, session.get(Word.STALL_NS_TOTAL) + nanoseconds)
        session.put(Word.LAST_STALL_NS, nanoseconds + (0 if first else session.get(Word.LAST_STALL_NS)))

    # -- the rest of the interface ----------------------------------------------------------------

    def wait(self) -> None:
        """The sync point of scheme 1: until the newest snapshot has been copied."""
        began = time.monotonic_ns()
        self._stager.wait_copied()
        self._stalled(time.monotonic_ns() - began)

    def save(self) -> None:
        """Snapshot and persist the state of the last boundary, or of the next one when an update has begun."""
        if self._session.gate.updating or self._rest is None:
            self._save_requested = True
        else:
            self._submit(persist=True, kind="requested", must=True)

    @property
    def should_stop(self) -> bool:
        """Whether the plan says that this step was the last one."""
        stop_after = self._planner.plan.stop_after
        return stop_after is not None and self.step >= stop_after

    def finish(self) -> None:
        """The loop is over: the final state goes into a slot, whatever it takes."""
        if self._finished:
            return
        self._finished = True
        session = self._session
        session.set_phase(Phase("save"))
        if not self._layout_number:
            self._layout_number = self._stager.agreement.begin(self._collector.state.chunks)
        if self._rest is None or self._rest.layout_number != self._layout_number:
            self._rest = self._resting(self._recorder.build(self.step, session.get(Word.GENERATION)))
        job = self._final_snapshot("last-words" if self.should_stop else "final")
        if job.ok:
            session.put(Word.DONE, 1)
            session.send(wire.Finished(step=self.step))
        else:
            text = f"the final state of step {self.step} found no free slot in the memory volume"
            session.send(wire.RankNotice(code="final-failed", text=text))

    def _final_snapshot(self, kind: str) -> Job:
        """The snapshot of a planned stop has the final state already; otherwise it is taken now."""
        newest = self._newest_job
        if newest is not None and newest.rest is self._rest and newest.kind == kind and newest.persist:
            newest.done.wait()
            if newest.ok:
                return newest
        job = self._submit(persist=True, kind=kind, must=True)
        job.done.wait()
        return job

    def _script_ends(self) -> None:
        """The script has ended normally without `steps()`: its last boundary is the final state."""
        if not self._finished and self._rest is not None and not self._session.gate.updating:
            self.finish()

    def set_phase(self, name: str, timeout_seconds: float | None) -> None:
        """Say what the script does now."""
        self._session.set_phase(Phase(name, timeout_seconds))

    def end_phase(self) -> None:
        """Back to what it did before."""
        self._session.set_phase(Phase("first_step" if self._first_boundary else "training"))

    def report(self, loss: float) -> None:
        """Show the loss."""
        self._session.put(Word.LOSS_BITS, struct.unpack("<Q", struct.pack("<d", loss))[0])


def mode_of(argument: str | None) -> str:
    """The mode from the argument, else from the environment. Raises ValueError."""
    mode = argument or os.environ.get(environment.MODE) or OVERLAP
    if mode not in (OVERLAP, MANUAL, BLOCKING):
        raise ValueError(f"mode is {mode!r}; it must be {OVERLAP!r}, {MANUAL!r} or {BLOCKING!r}")
    return mode
