"""An agent for wrapped commands, and runs of the reference model by two ranks under any command."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lastwords.protocol import wire
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.snapshots import SnapshotPlan
from tests.processes.launcher.fake_agent import FakeAgent, Launched, Peer, end
from tests.processes.run import cases

STEPS = 30
SCRIPT = (f"--steps={STEPS}", "--loader-workers=1", "--step-seconds=0.02", "--foretold")
WORLD = 2


class WrappedAgent(FakeAgent):
    """Has the launcher watch the ranks that say hello, and welcomes them."""

    def _answer(self, peer: Peer, message: Any) -> None:
        if not isinstance(message, wire.RankHello):
            super()._answer(peer, message)
            return
        self.launcher.send(wire.RanksFound(attempt=message.attempt, pids={message.rank: message.pid}))
        peer.send(
            wire.Welcome(
                attempt=message.attempt,
                store_address="nobody:1",  # a rank below a wrapped command goes by its own environment
                restore=wire.RestoreOrder(source=RestoreSource.BEGINNING),
                plan=SnapshotPlan(number=1, from_step=1, every_steps=10**9),
                slots=2,
            )
        )


@contextlib.contextmanager
def wrapped(folder: pathlib.Path, script: str, *, procs: int, may_exit: bool = True) -> Iterator[tuple[Launched, Any]]:
    """A launcher that runs the shell script `script` as it is, with an agent; afterwards nothing of it is left."""
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{script}")
    path.chmod(0o755)
    launched = Launched(folder, ["./run.sh"], procs=procs, variables={"PYTHON": sys.executable})
    agent = WrappedAgent(launched.volume, may_exit=may_exit)
    try:
        yield launched, agent
    finally:
        end(launched, agent)


def undisturbed(folder: pathlib.Path) -> pathlib.Path:
    """The reference model, trained by two ranks of torchrun without Lastwords; its result file."""
    out = folder / "undisturbed.json"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", "--standalone"]
    command += [str(cases.REFERENCE), *SCRIPT, f"--out={out}"]
    subprocess.run(command, check=True, env=os.environ | cases.ENVIRONMENT, cwd=folder, stdout=subprocess.DEVNULL)
    return out


def start(run: cases.Run, command: list[str], *, workers: int, variables: Mapping[str, str]) -> None:
    """`lastwords run` of a command by two ranks, one of which is killed in the middle."""
    line = [sys.executable, "-m", "lastwords_operator.cli", "run", "--plain", "--name=job", f"--dir={run.job}"]
    line += [f"--memory-dir={run.memory}", f"--workers={workers}", f"--procs={WORLD // workers}"]
    line += ["--save-every=10steps", "--inject=kill rank=1 at-step=12", "--", *command]
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        run.start_line(line)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def went_on(run: cases.Run, reference: pathlib.Path) -> dict[str, Any]:
    """The run is complete, lost no step, equals the undisturbed one and left nothing; its one recovery."""
    assert run.wait(170) == 0, run.text()
    mine, theirs = cases.losses(run.out, WORLD), cases.losses(reference, WORLD)
    different = sorted(key for key in theirs if mine.get(key) != theirs[key])
    assert not different, f"(rank, step) {different[:4]} differ\n{run.text()}"
    assert set(mine) == set(theirs)
    assert json.loads(run.out.read_text()) == json.loads(reference.read_text())
    run.left_nothing()
    (recovery,) = run.status()["recoveries"]
    assert (recovery["kind"], recovery["rank"]) == ("RankKilled", 1), recovery
    assert (recovery["source"], recovery["steps_lost"], recovery["exact"]) == ("memory", 0, True), recovery
    return dict(recovery)
