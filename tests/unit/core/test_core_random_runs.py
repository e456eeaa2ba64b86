"""
Random faults, lost, repeated and late messages, over simulated workers. After every pass `Loop.check` proves that
deciding again changes nothing, that attempts only grow and that the source is on the job's path.
"""

from __future__ import annotations

import random

import pytest

from lastwords.protocol.messages import RankState, RestoreSource
from lastwords_operator.core.model import FailurePolicy, JobSpec, JobState
from tests.unit.core.sim_loop import Loop
from tests.unit.core.sim_world import World

_STEPS = 30
_MOST_TICKS = 6000


def _loop(rng: random.Random, loss: float) -> Loop:
    spec = JobSpec(
        name="job", workers=rng.randint(1, 3), processes_per_worker=rng.randint(1, 3),
        policy=FailurePolicy(max_restarts=1000),
    )  # fmt: skip
    return Loop(World(spec, steps=_STEPS, step_seconds=0.3), rng, loss)


def _oracle(world: World) -> int | None:
    """The newest step that a plain look at everything shows to be restorable exactly; with DDP all hold all."""
    reports = [worker.report() for worker in world.workers if worker.agent_alive]
    attempt = max(worker.attempt for worker in world.workers)
    found = {}
    for report in reports:
        for record in report.records:
            found.setdefault((record.step, record.attempt), {}).setdefault(record.rank, []).append(record.provisional)
    whole = {
        key for key, ranks in found.items()
        if len(ranks) == world.topology.world and any(not all(marks) for marks in ranks.values())
    }  # fmt: skip
    live = {
        (rank.step, attempt) for rank in world.ranks()
        if rank.step is not None and not rank.odd and not rank.stopped and rank.state is not RankState.EXITED
    }  # fmt: skip
    parts = {
        (part.step, part.attempt) for worker in world.workers for part in worker.report().parts
        if len(worker.holds(part.step, part.attempt)) == len(worker.numbers)
    }  # fmt: skip
    return max((step for step, number in whole if (step, number) in live | parts), default=None)


def _inject(loop: Loop, rng: random.Random) -> None:
    """A root fault of some kind."""
    rank = rng.choice([rank.number for rank in loop.world.ranks() if rank.alive])
    kind = rng.choice(["gate", "update", "behind", "launcher", "exception"])
    if kind == "launcher":
        loop.kill_launcher(loop.world.topology.worker_of(rank), rng.choice([0.2, 1.0]))
    elif kind == "exception":
        loop.world.raise_in(rank, "RuntimeError", f"odd {rng.random()}")
        for other in loop.world.ranks():
            if other.state is RankState.RUNNING and rng.random() < 0.3:
                loop.world.echo(other.number)
    else:
        loop.world.kill(rank, kind)


@pytest.mark.parametrize("seed", range(25))
def test_one_restart_for_each_root_fault_and_the_newest_step(seed: int) -> None:
    """
    O-21, O-14: faults with time between them, messages lost and repeated: as many restarts as faults, each from exactly
    the step that the oracle names, nothing below it, and the job ends Complete.
    """
    rng = random.Random(seed)
    loop = _loop(rng, loss=0.2)
    faults, expected = 0, None
    for _ in range(_MOST_TICKS):
        before = loop.status
        loop.tick()
        if loop.status.attempt > before.attempt and expected is not None:
            assert loop.status.restore is not None
            assert loop.status.restore.step == expected
            assert loop.status.restore.exact
            assert loop.status.restore.source is RestoreSource.MEMORY
            expected = None
        if loop.status.state.over:
            break
        quiet = loop.status.state is JobState.RUNNING and loop.status.stable_since is not None
        running = [rank for rank in loop.world.ranks() if rank.state is RankState.RUNNING and not rank.held]
        if (
            quiet
            and expected is None
            and len(running) == loop.world.topology.world
            and rng.random() < 0.1
            and faults < 6
        ):
            _inject(loop, rng)
            faults += 1
            expected = _oracle(loop.world)
            assert expected is not None
        if rng.random() < 0.02:
            loop.restart_coordinator()
    assert loop.status.state is JobState.COMPLETE, loop.status.message
    assert len(loop.status.recoveries) == faults
    assert all(row.first_step_at or row.step == _STEPS for row in loop.status.recoveries)
    assert loop.status.attempt == faults + 1


@pytest.mark.parametrize("seed", range(100, 130))
def test_faults_at_any_moment_end_well(seed: int) -> None:
    """
    Faults in every phase, agents and coordinators that go and come back: the job ends Complete, never with more
    restarts than faults, never from a step below the last one restored.
    """
    rng = random.Random(seed)
    loop = _loop(rng, loss=0.3)
    faults, restored = 0, 0
    for _ in range(_MOST_TICKS):
        before = loop.status
        loop.tick()
        status = loop.status
        if status.attempt > before.attempt and status.restore is not None:
            assert status.restore.step >= restored
            restored = status.restore.step
        if status.state.over:
            break
        alive = [rank for rank in loop.world.ranks() if rank.alive]
        if alive and faults < 12 and rng.random() < 0.05:
            _inject(loop, rng)
            faults += 1
        if rng.random() < 0.02:
            loop.restart_coordinator()
        worker = rng.randrange(loop.world.spec.workers)
        if rng.random() < 0.02 and loop.world.workers[worker].agent_alive:
            loop.kill_agent(worker, rng.choice([0.3, 2.0]))
    assert loop.status.state is JobState.COMPLETE, loop.status.message
    assert len(loop.status.recoveries) <= faults
    assert loop.status.attempt <= faults + 1
