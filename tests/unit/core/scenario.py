"""
Scenario files: commands in, decisions out.

A block is one or more command lines, a line of four dashes, and what the coordinator decided meanwhile. Commands:

    job workers=2 procs=2 steps=100 [step_seconds=…] [max_restarts=…] [interval_steps=…] [startup_failures=…] …
    run [seconds=S] [until=STATE] [step=N]      let time pass (at most 300 s)
    kill rank=R [window=gate|update|behind]     error rank=R type=T text=…  [echo=yes]
    freeze rank=R    wander rank=R              a stopped process; one that leaves the collective
    phase rank=R name=N [timeout=S]
    kill-launcher worker=W   kill-agent worker=W seconds=S   restart-coordinator   replace worker=W
    ask-stop reason=…    resume    storage works=yes|no    non-finite from=N    lose-checkpoints    lose-memory
    notice rank=R code=C text=…    launcher-error worker=W text=…

Rewrite the files with LASTWORDS_REWRITE=1 and read the difference.
"""

from __future__ import annotations

import dataclasses
import shlex

from lastwords.protocol.messages import LiveCopy, Notice, PersistOrder, WorkerOrder
from lastwords_operator.core.model import (
    Deadlines,
    FailurePolicy,
    FailureRule,
    Interval,
    IntervalMode,
    JobSpec,
    RuleAction,
)
from lastwords_operator.core.observation import Decision
from tests.unit.core.sim_loop import Loop
from tests.unit.core.sim_world import Worker, World

_LIMIT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Block:
    """Comment and command lines, as they stand, and the expected output."""

    lines: tuple[str, ...]
    expected: tuple[str, ...]


def parse(text: str) -> list[Block]:
    """Blocks of a file; they end at an empty line."""
    blocks = []
    for chunk in text.strip().split("\n\n"):
        head, _, tail = chunk.partition("\n----")
        blocks.append(
            Block(tuple(head.strip("\n").split("\n")), tuple(tail.strip("\n").split("\n")) if tail.strip() else ())
        )
    return blocks


def render(blocks: list[Block]) -> str:
    """The text of a file."""
    shown = []
    for block in blocks:
        commands = any(line and not line.startswith("#") for line in block.lines)
        shown.append("\n".join((*block.lines, "----", *block.expected) if commands else block.lines))
    return "\n\n".join(shown) + "\n"


class Interpreter:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.output: list[str] = []
        self.shown = ""

    def run(self, block: Block) -> Block:
        """The block with the output that it really has."""
        self.output = []
        for line in block.lines:
            if line and not line.startswith("#"):
                name, *words = shlex.split(line)
                given = dict(word.split("=", 1) for word in words)
                getattr(self, "do_" + name.replace("-", "_"))(**given)
        return Block(block.lines, tuple(self.output))

    @property
    def world(self) -> World:
        assert self.loop is not None
        return self.loop.world

    # --- commands ---

    def do_job(self, workers: str, procs: str, steps: str = "100", step_seconds: str = "0.5", **options: str) -> None:
        rules = ()
        if "fail_on" in options:
            rules = (FailureRule(action=RuleAction.FAIL_JOB, on_exit_codes=(int(options["fail_on"]),)),)
        interval = Interval()
        if "interval_steps" in options:
            interval = Interval(mode=IntervalMode.FIXED_STEPS, steps=int(options["interval_steps"]))
        spec = JobSpec(
            name="job", workers=int(workers), processes_per_worker=int(procs), interval=interval,
            allow_beginning=options.get("allow_beginning") == "yes",
            policy=FailurePolicy(
                rules=rules, max_restarts=int(options.get("max_restarts", "10")),
                stable_seconds=float(options.get("stable", "600")),
            ),
            deadlines=Deadlines(finish=float(options.get("finish", "300"))),
            last_words_timeout=float(options.get("timeout", "60")),
        )  # fmt: skip
        self.loop = Loop(World(spec, steps=int(steps), step_seconds=float(step_seconds)))
        self.loop.tick_seconds = float(options.get("tick", "0.1"))

    def do_run(self, seconds: str = "", until: str = "", step: str = "") -> None:
        assert self.loop is not None
        end = self.world.now + (float(seconds) if seconds else _LIMIT_SECONDS)
        while self.world.now < end:
            self.note(self.loop.tick())
            steps = [rank.step for rank in self.world.ranks() if rank.step is not None]
            if until and self.loop.status.state.value == until:
                return
            if step and steps and max(steps) >= int(step):
                return
        if not seconds:
            raise AssertionError(f"not reached: until={until} step={step}; {self.loop.status.message}")

    def do_kill(self, rank: str, window: str = "gate") -> None:
        self.world.kill(int(rank), window)

    def do_error(self, rank: str, type: str = "", text: str = "", echo: str = "") -> None:
        if echo:
            self.world.echo(int(rank))
        else:
            self.world.raise_in(int(rank), type, text)

    def do_freeze(self, rank: str) -> None:
        self.world.rank(int(rank)).stopped = True

    def do_wander(self, rank: str) -> None:
        self.world.rank(int(rank)).in_collective = False

    def do_phase(self, rank: str, name: str, timeout: str = "") -> None:
        it = self.world.rank(int(rank))
        it.phase, it.phase_timeout = name or None, float(timeout) if timeout else None
        it.moved_at = self.world.now
        it.in_collective = name == "training"

    def do_kill_launcher(self, worker: str) -> None:
        assert self.loop is not None
        self.loop.kill_launcher(int(worker))

    def do_kill_agent(self, worker: str, seconds: str) -> None:
        assert self.loop is not None
        self.loop.kill_agent(int(worker), float(seconds))

    def do_restart_coordinator(self) -> None:
        assert self.loop is not None
        self.loop.restart_coordinator()

    def do_replace(self, worker: str) -> None:
        assert self.loop is not None
        self.loop.replace(int(worker), self.world.workers[int(worker)].incarnation)

    def do_ask_stop(self, reason: str) -> None:
        assert self.loop is not None
        self.loop.stop_requested = reason

    def do_resume(self) -> None:
        assert self.loop is not None
        self.loop.stop_requested = ""

    def do_storage(self, works: str) -> None:
        self.world.storage_works = works == "yes"

    def do_non_finite(self, **given: str) -> None:
        self.world.finite_until = int(given["from"])

    def do_lose_checkpoints(self) -> None:
        self.world.catalog.clear()

    def do_lose_memory(self) -> None:
        self.world.workers = [Worker(self.world, w.index, 1) for w in self.world.workers]

    def do_reject_checkpoints(self, reason: str) -> None:
        self.world.catalog = {
            id_: dataclasses.replace(info, rejected=reason) for id_, info in self.world.catalog.items()
        }

    def do_copy_fails(self, worker: str) -> None:
        self.world.workers[int(worker)].copy_fails = True

    def do_notice(self, rank: str, code: str, text: str) -> None:
        worker = self.world.workers[self.world.topology.worker_of(int(rank))]
        worker.notices = (Notice(code=code, text=text, rank=int(rank), fatal=True),)

    def do_launcher_error(self, worker: str, text: str) -> None:
        self.world.workers[int(worker)].launcher_error = text

    # --- output ---

    def note(self, decision: Decision) -> None:
        """One line for each event, and one for the orders when they mean something else than before."""
        now = f"{self.world.now:7.1f}"
        for event in decision.events:
            self.output.append(f"{now} {'!' if event.warning else ' '} {event.reason}: {event.message.splitlines()[0]}")
        shown = "; ".join(_orders(decision))
        if shown != self.shown:
            self.shown = shown
            self.output.append(f"{now}   -> {decision.status.state.value}, attempt {decision.status.attempt}: {shown}")


def _orders(decision: Decision) -> list[str]:
    """What the orders say; workers that are told the same share a line."""
    by_text: dict[str, list[str]] = {}
    for worker, order in sorted(decision.orders.items()):
        by_text.setdefault(_order(order), []).append(str(worker))
    return [f"worker {'+'.join(workers)} {text}" for text, workers in by_text.items()]


def _order(order: WorkerOrder) -> str:
    words = [order.run.value]
    if order.restore is not None:
        words.append(f"from {order.restore.source.value} {order.restore.step}/{order.restore.attempt}")
    if order.hold:
        words.append("hold")
    if order.release_to is not None:
        words.append(f"release to {order.release_to}")
    words.extend(_copy(order.live_copy))
    words.extend(_persist(order.persist))
    if order.plan is not None and order.plan.stop_after is not None:
        words.append(f"stop after {order.plan.stop_after}")
    return " ".join(words)


def _copy(copy: LiveCopy | None) -> list[str]:
    if copy is None or not copy.writers:
        return []
    return [f"copy step {copy.step} (" + " ".join(f"part {p} by {r}" for p, r in copy.writers.items()) + ")"]


def _persist(order: PersistOrder | None) -> list[str]:
    return [f"persist {order.step}/{order.attempt} as {order.kind}"] if order is not None else []
