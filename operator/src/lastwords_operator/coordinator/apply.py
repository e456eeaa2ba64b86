"""
Carries out a decision: status first, then orders and actions, then events.

A crash in between loses nothing: orders and actions follow from the status, so the next pass repeats them.
"""

from __future__ import annotations

from typing import assert_never

from lastwords.protocol.messages import RunState
from lastwords_operator.coordinator import ports
from lastwords_operator.core import observation
from lastwords_operator.core.model import JobStatus


async def apply(
    decision: observation.Decision,
    *,
    status: JobStatus,
    version: int,
    now: float,
    store: ports.StatusStore,
    links: ports.Links,
    workers: ports.Workers,
    events: ports.Events,
) -> int:
    """The status's version afterwards. Raises ConflictError, before anything was done, when somebody else wrote it."""
    if decision.status != status or version == 0:
        version = await store.save(decision.status, version)
    links.push(decision.orders)
    for worker, order in decision.orders.items():
        if order.run is RunState.ENDED:
            await workers.end(worker)
    for action in decision.actions:
        match action:
            case observation.EnsureWorker():
                await workers.ensure(action.worker)
            case observation.ReplaceWorker():
                await workers.replace(action.worker, action.incarnation)
            case _:
                assert_never(action)
    for event in decision.events:
        await events.emit(now, event)
    return version
