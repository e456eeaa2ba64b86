"""
The agent of one worker: compares what should be (the newest order) with what is, and does what differs.

Level-triggered: every message only changes what is known; `_reconcile` looks at all of it. So the agent may die at any
line: the next one reads the volume and its memory, hears from launcher, ranks and coordinator again, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from typing import Any

from lastwords.agent import prepare, reporting, starting
from lastwords.agent.channel import Channel
from lastwords.agent.fetch import FetchServer
from lastwords.agent.holding import Holder, LiveCopies, StackCollector
from lastwords.agent.local import Connection, LocalServer
from lastwords.agent.lost import CoordinatorLost
from lastwords.agent.offload import Offload
from lastwords.agent.peers import Peers
from lastwords.agent.records import RecordSender
from lastwords.agent.replicas import ReplicaKeeper, ReplicaSender
from lastwords.agent.saving import Saver
from lastwords.agent.settings import Settings
from lastwords.agent.stored import BlockServer
from lastwords.agent.volume import Volume
from lastwords.agent.windows import window
from lastwords.agent.worker import Worker
from lastwords.protocol import wire
from lastwords.protocol.manifest import CheckpointId
from lastwords.protocol.messages import AgentReport, Hello, Prepared, RestorePlan, RestoreSource, RunState, WorkerOrder
from lastwords.storage import places
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints

log = logging.getLogger("lastwords.agent")

_TICK_SECONDS = 0.1
_END_SECONDS = 15.0
"""After the order to end: how long launcher and saves are waited for."""


class Agent:
    """One per process; `run` is its life."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._agent_run = secrets.token_hex(6)
        self._volume = Volume(settings.volume, settings.slots)
        self._worker = Worker(settings, self._volume)
        self._offload = Offload("lastwords-storage", threads=2 if places.is_folder(settings.storage) else 8)
        self._checkpoints = JobCheckpoints.at(settings.storage, settings.namespace, settings.job_name)
        self._blocks = BlockServer(self._checkpoints, settings.volume)
        self._local = LocalServer(settings.volume, self._on_message, self._on_end)
        self._peers = Peers(settings.token, lambda: self._worker.order.peers if self._worker.order else {})
        self._records = RecordSender(self._worker, self._volume, self._peers)
        self._replicas = ReplicaSender(self._worker, self._volume, self._peers)
        self._fetch = FetchServer(
            self._volume,
            settings.token,
            lambda: self._worker.kept_ranks,
            self._record_came,
            ReplicaKeeper(self._volume, self._peers).keep,
        )
        self._saver = Saver(self._worker, self._checkpoints, self._offload, self._peers, self._changed)
        self._holder = Holder(self._worker)
        self._copies = LiveCopies(self._worker, self._saver.free)
        self._stacks = StackCollector(self._worker)
        hello = Hello(
            worker=settings.worker,
            incarnation=settings.incarnation,
            agent_run=self._agent_run,
            token=settings.token,
        )
        self._channel = Channel(settings.coordinator, hello, self._report, self._on_order, self._changed)
        self._lost = CoordinatorLost(self._worker, self._holder, self._saver)
        self._wake = asyncio.Event()
        self._prepare_task: asyncio.Task[None] | None = None
        self._preparing: tuple[int, RestorePlan] | None = None
        self._end_by: float | None = None

    async def run(self) -> None:
        """Until the job has ended, or the coordinator is lost and the state is kept."""
        self._local.lock()
        self._volume.unpin_all(self._worker.topology.processes_per_worker)
        await self._fetch.start(self._settings.fetch_host, self._saver.calls.routes())
        await self._local.start()
        await self._blocks.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)
        channel = asyncio.create_task(self._channel.run())
        try:
            while not self._ended():
                self._reconcile()
                try:
                    await asyncio.wait_for(self._wake.wait(), _TICK_SECONDS)
                except asyncio.TimeoutError:
                    pass
                self._wake.clear()
                if channel.done():
                    channel.result()
            await self._channel.send_last()
        finally:
            channel.cancel()
            await asyncio.gather(channel, return_exceptions=True)
            await prepare.cancel(self._prepare_task)
            await self._saver.stop()
            await self._replicas.stop()
            await self._local.stop()
            await self._blocks.stop()
            await self._peers.stop()
            await self._fetch.stop()

    # -- what comes in ----------------------------------------------------------------------------

    def _changed(self) -> None:
        self._wake.set()
        self._channel.changed()

    def _record_came(self) -> None:
        """A neighbour's record, at each of its boundaries: only in a fault does it matter at once."""
        self._channel.changed(urgent=self._holder.number > 0)

    def _on_message(self, connection: Connection, message: Any) -> None:
        rank = self._worker.take(connection, message)
        if isinstance(message, wire.Boundary):
            self._channel.changed(urgent=False)
            if rank is not None:
                self._records.boundary(rank, message)
            return
        if isinstance(message, wire.RecordWritten):
            if rank is not None:
                self._records.early(rank, message)
            return
        if rank is not None and isinstance(message, wire.SnapshotReady):
            self._replicas.ready(rank, message)
            self._records.snapshot(rank, message)
        if rank is not None and isinstance(message, wire.LiveCopyDone):
            self._copies.answered(rank, message)
        if rank is not None and isinstance(message, wire.Stacks):
            self._stacks.answered(rank)
        self._changed()

    def _on_end(self, connection: Connection) -> None:
        self._worker.lost(connection)
        # Before anything else: the others must not begin another update.
        self._holder.reconcile()
        self._changed()

    def _on_order(self, order: WorkerOrder) -> None:
        before = self._worker.order
        if self._worker.take_order(order):
            if order.run is RunState.STOPPED and (before is None or before.run is not RunState.STOPPED):
                self._saver.reload()
            self._changed()

    def _terminated(self) -> None:
        self._worker.stop_requested = self._worker.stop_requested or "SIGTERM"
        self._changed()

    # -- what is done -----------------------------------------------------------------------------

    def _reconcile(self) -> None:
        self._holder.reconcile()
        self._lost.reconcile(self._channel.away_seconds())
        if self._lost.ending:
            starting.stop_all(self._worker)
        else:
            starting.reconcile(self._worker)
            self._prepare()
            starting.welcome(self._worker)
            self._copies.reconcile()
        self._stacks.reconcile()
        self._saver.reconcile()
        self._let_go()

    def _prepare(self) -> None:
        """Begin to prepare a new restore plan; what was prepared and noted is never prepared again."""
        worker = self._worker
        order = worker.current
        if order is None or order.restore is None or worker.memory.prepared_attempt >= order.attempt:
            return
        if self._preparing == (order.attempt, order.restore):
            return
        if self._prepare_task is not None and not self._prepare_task.done():
            self._prepare_task.cancel()
            return
        self._preparing = (order.attempt, order.restore)
        self._prepare_task = asyncio.create_task(self._run_preparation(order.attempt, order.restore))

    async def _run_preparation(self, attempt: int, plan: RestorePlan) -> None:
        worker = self._worker
        preparation = prepare.Preparation(
            plan,
            worker.number,
            worker.topology,
            volume=self._volume,
            peers=self._peers,
            offload=self._offload,
            checkpoints=self._checkpoints,
        )
        try:
            with window("prepare"):
                welcomes = await preparation.run()
                if worker.attempt == attempt:
                    # Noted before any rank is welcomed: ranks that train must never be prepared under their feet.
                    worker.remember(prepared_attempt=attempt, prepared_plan=plan, welcomes=welcomes)
                    worker.prepared = Prepared(attempt=attempt, ok=True)
        except prepare.PrepareError as error:
            log.warning("attempt %d cannot be prepared: %s", attempt, error)
            if isinstance(error.__cause__, CheckpointError) and plan.source is RestoreSource.CHECKPOINT:
                self._saver.reject(CheckpointId(step=plan.step, attempt=plan.attempt), str(error))
            if worker.attempt == attempt:
                worker.prepared = Prepared(attempt=attempt, ok=False, error=str(error))
        except Exception as error:
            log.exception("preparing attempt %d failed", attempt)
            worker.prepared = Prepared(attempt=attempt, ok=False, error=repr(error))
        self._changed()

    def _let_go(self) -> None:
        """Ranks that are through may exit once their last step is on storage, or cannot get there."""
        worker = self._worker
        restored = worker.memory.prepared_plan if worker.memory.prepared_attempt == worker.attempt else None
        for rank in worker.ranks.values():
            if rank.connection is None or rank.may_exit_sent or not rank.through or rank.ended is None:
                continue
            if rank.finished is not None and rank.finished.step > 0:
                step = rank.finished.step
                saved = self._saver.committed(step, worker.attempt) or self._saver.hopeless(step, worker.attempt)
                if restored is not None and restored.step == step:
                    saved = saved or self._saver.committed(step, restored.attempt)
                if not saved:
                    continue
            rank.may_exit_sent = True
            rank.send(wire.MayExit())

    def _ended(self) -> bool:
        """Whether launcher and ranks have ended as ordered, so that this process can end too."""
        worker, order = self._worker, self._worker.order
        wanted = self._lost.ending or (order is not None and order.run is RunState.ENDED)
        if not wanted:
            self._end_by = None
            return False
        now = time.monotonic()
        if self._end_by is None:
            self._end_by = now + _END_SECONDS
        if worker.launcher_known() and not worker.any_alive() and worker.launcher is not None:
            worker.launcher.send(wire.EndLauncher())
        gone = worker.launcher is None and not worker.any_alive() and worker.launcher_hello is not None
        return now >= self._end_by or (gone and self._saver.idle)

    def _report(self) -> AgentReport:
        return reporting.build(
            self._worker,
            agent_run=self._agent_run,
            fetch_address=self._fetch.address,
            holder=self._holder,
            copies=self._copies,
            storage=self._saver.report(),
        )


async def run(settings: Settings) -> None:
    """The life of an agent."""
    os.umask(0o077)
    await Agent(settings).run()
