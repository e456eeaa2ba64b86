"""The report of an agent: what is, as one whole value."""

from __future__ import annotations

from lastwords.agent.holding import Holder, LiveCopies
from lastwords.agent.worker import Worker
from lastwords.protocol import pieces
from lastwords.protocol.messages import AgentReport, RunState, StorageReport


def build(
    worker: Worker,
    *,
    agent_run: str,
    fetch_address: str,
    holder: Holder,
    copies: LiveCopies,
    storage: StorageReport,
) -> AgentReport:
    """The newest report."""
    order, volume, memory = worker.order, worker.volume, worker.memory
    kept = worker.kept_ranks
    table = volume.table()
    hello = worker.launcher_hello
    made_by = memory.layout_attempt if table is not None and memory.layout_generation == table.generation else 0
    return AgentReport(
        worker=worker.number,
        incarnation=worker.settings.incarnation,
        agent_run=agent_run,
        epoch_seen=order.epoch if order is not None else 0,
        order_seen=order.number if order is not None else 0,
        attempt=worker.attempt,
        run=_run_state(worker),
        launcher=worker.launcher_known(),
        launcher_error=hello.error if hello is not None and worker.launcher is not None else "",
        fetch_address=fetch_address,
        store_address=worker.store_address if worker.number == 0 else "",
        ranks=tuple(rank.report(volume.block(number), holder.number) for number, rank in sorted(worker.ranks.items())),
        parts=volume.holdings(kept),
        records=volume.record_holdings(kept),
        table=pieces.summarise(table) if table is not None else None,
        layout_attempt=made_by,
        storage=storage,
        self_hold=holder.count,
        copied=copies.done,
        copy_errors=copies.errors,
        prepared=worker.prepared,
        notices=tuple(worker.notices.values()),
        stop_requested=worker.stop_requested,
    )


def _run_state(worker: Worker) -> RunState:
    if worker.any_alive():
        return RunState.RUNNING
    if not worker.launcher_known() and worker.attempt > 0 and worker.launcher_hello is None:
        # Nothing was heard yet: ranks may well be alive.
        return RunState.RUNNING
    return RunState.STOPPED
