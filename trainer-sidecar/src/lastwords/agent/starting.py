"""Runs and stops ranks as the order wants it, and welcomes them once the worker is prepared."""

from __future__ import annotations

from lastwords.agent.ranks import Rank
from lastwords.agent.worker import Worker
from lastwords.protocol import environment, wire
from lastwords.protocol.messages import RunState, WorkerOrder
from lastwords.protocol.snapshots import SnapshotPlan


def reconcile(worker: Worker) -> None:
    """Order from the launcher what differs from the order."""
    order = worker.order
    if order is None or not worker.launcher_known():
        return
    if order.run is not RunState.RUNNING:
        if worker.any_alive():
            _stop(worker, order.attempt, order.kill_grace_seconds)
    elif order.attempt > worker.attempt:
        if worker.any_alive():
            _stop(worker, order.attempt - 1, order.kill_grace_seconds)
        elif worker.launcher_hello is not None and not worker.launcher_hello.error:
            worker.start_attempt(order.attempt)
            _run(worker, order)
    elif worker.launcher_hello is not None and worker.launcher_hello.pid == worker.memory.started_by:
        # The agent may have died between its note and the message. Another launcher is never asked: its ranks would be
        # a second start of the same attempt.
        _run(worker, order)
    if worker.wrapped:
        _tell_found(worker)


def stopping(worker: Worker) -> bool:
    """Whether the death of a rank is what is wanted now."""
    order = worker.order
    if order is None:
        return False
    return order.run is not RunState.RUNNING or order.attempt > worker.attempt


def welcome(worker: Worker) -> None:
    """Release ranks into the attempt, and hand on new snapshot plans."""
    order = worker.current
    if order is None or worker.memory.prepared_attempt != order.attempt or not order.store_address:
        return
    plan = order.plan or SnapshotPlan()
    for rank in worker.ranks.values():
        if rank.connection is None:
            continue
        if not rank.welcomed:
            _welcome(worker, rank, order, plan)
        if plan.number != rank.plan_sent:
            rank.plan_sent = plan.number
            rank.send(wire.NewPlan(plan=plan))


def _welcome(worker: Worker, rank: Rank, order: WorkerOrder, plan: SnapshotPlan) -> None:
    parent = next((entry.parent for entry in order.lineage if entry.attempt == order.attempt), 0)
    rank.send(
        wire.Welcome(
            attempt=order.attempt,
            store_address=order.store_address,
            restore=worker.memory.welcomes[rank.rank],
            plan=plan,
            slots=worker.settings.slots,
            replicas=worker.replicas,
            lineage_parent=parent,
        )
    )
    rank.welcomed = True
    hello = rank.connection.hello if rank.connection is not None else None
    if not (isinstance(hello, wire.RankHello) and hello.resumed):
        # A process that was welcomed before takes no second welcome: it gets the plan by itself.
        rank.plan_sent = plan.number


def _run(worker: Worker, order: WorkerOrder) -> None:
    address = order.store_address if worker.wrapped else ""
    sent = (order.attempt, worker.launcher, address)
    if worker.runs_sent == sent or worker.launcher is None:
        return
    worker.runs_sent = sent
    topology = worker.topology
    variables = {
        environment.ATTEMPT: str(order.attempt),
        environment.WORKER: str(worker.number),
        environment.WORKERS: str(topology.workers),
        environment.PROCESSES_PER_WORKER: str(topology.processes_per_worker),
        environment.VOLUME: worker.settings.volume,
    }
    ranks = tuple(worker.own_ranks)
    message = wire.RunRanks(attempt=order.attempt, ranks=ranks, environment=variables, store_address=address)
    worker.launcher.send(message)


def _tell_found(worker: Worker) -> None:
    """Have the launcher watch ranks that it did not start."""
    pids = {rank.rank: rank.pid for rank in worker.ranks.values() if rank.pid}
    sent = (pids, worker.launcher)
    if not pids or worker.launcher is None or worker.found_sent == sent:
        return
    worker.found_sent = sent
    worker.launcher.send(wire.RanksFound(attempt=worker.attempt, pids=pids))


def _stop(worker: Worker, attempt: int, grace_seconds: float) -> None:
    sent = (attempt, worker.launcher)
    if worker.stops_sent == sent or worker.launcher is None:
        return
    worker.stops_sent = sent
    worker.launcher.send(wire.StopRanks(attempt=attempt, grace_seconds=grace_seconds))


def stop_all(worker: Worker) -> None:
    """End the ranks without an order: the coordinator is lost."""
    if worker.launcher_known() and worker.any_alive():
        _stop(worker, worker.attempt, 0.0)
