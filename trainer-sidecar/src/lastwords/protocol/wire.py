"""
Launcher, ranks and agent of one worker: JSON lines over the unix socket in the memory volume.

Every line is {"kind": <class name>, ...fields}. Who connects says who it is first (`LauncherHello`,
`RankHello`). When the agent dies, launcher and ranks go on and connect again; the first lines then repeat
what the agent must know.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lastwords.protocol import codec
from lastwords.protocol.messages import ExitReport, RestoreSource, StackReport
from lastwords.protocol.snapshots import SnapshotPlan

MAX_LINE_BYTES = 16 * 1024 * 1024

# --- launcher -> agent ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherHello:
    """
    A launcher is there. `error`: the command cannot be run at all (not found, not executable). `wrapped`: the command
    is run as it is, once per worker; ranks are not started but found (`RanksFound`). `notices`: for the user, by code.
    """

    pid: int
    error: str = ""
    wrapped: bool = False
    notices: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank process as the launcher sees it."""

    rank: int
    pid: int
    alive: bool
    code: int | None = None
    signal: int | None = None
    log_tail: str = ""
    """Last lines of its output, when it died."""
    command_alive: bool | None = None
    """Of a wrapped command: whether that still runs. `pid` is the command's own until the rank is found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """All rank processes of the newest attempt the launcher was told of; sent on every change."""

    attempt: int
    processes: tuple[RankProcess, ...]
    standbys: int = 0
    cold_reason: str = ""
    """Why ranks are started as new interpreters rather than forked; "" when they are forked."""
    store_address: str = ""
    """Of a wrapped command on worker 0: host:port that is kept free for the attempt's TCPStore."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The launcher got SIGTERM."""

    reason: str


# --- agent -> launcher ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRanks:
    """
    Run the ranks of `attempt`; of older attempts nothing may be left. Idempotent: ranks of this attempt that
    were started once (alive or dead) are not started again. `environment` is added to the ranks' own.
    `store_address`: a wrapped command has to know it when it starts; without it only worker 0's can start.
    """

    attempt: int
    ranks: tuple[int, ...]
    environment: dict[str, str]
    store_address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksFound:
    """Ranks of a wrapped command that have connected: process id by rank, for the launcher to watch."""

    attempt: int
    pids: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRanks:
    """End all rank processes of attempts <= `attempt`, their children included. Answer: `Processes`."""

    attempt: int
    grace_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndLauncher:
    """End all ranks and exit with 0."""


# --- rank -> agent ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankHello:
    """The runner of a rank. `store_address`: rank 0 hosts the attempt's TCPStore there."""

    rank: int
    attempt: int
    pid: int
    store_address: str = ""
    resumed: bool = False
    """True when this is not the first connection of this process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutReady:
    """`layout.json` of this generation stands in the memory volume."""

    generation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordWritten:
    """The early record of `step` is committed; the neighbour should have it before others can pass that boundary."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordKept:
    """The neighbour has the early record of `step`."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """A boundary was passed; its record is committed. `foretold`: the early record said the same of this rank."""

    step: int
    foretold: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotReady:
    """The rank's own part of `step` is READY in `slot`. `persist`: it is to go to storage, as `persist_kind`."""

    step: int
    slot: int
    persist: bool
    persist_kind: str = "periodic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoldState:
    """Answer to `Hold`, and again whenever one of these changes while held."""

    hold: int
    step: int
    odd: bool
    at_gate: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveCopyDone:
    """Result of `CopyLive`; `error` "" = all parts are READY at the step."""

    number: int
    step: int
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
    """Answer to `DumpStacks`."""

    number: int
    stack: StackReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptEnded:
    """
    The script ended: `exit` None = normally. The runner waits for `MayExit` before it leaves, so that
    its state can be copied.
    """

    exit: ExitReport | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankNotice:
    """For the user; `fatal` = a restart will not help."""

    code: str
    text: str
    fatal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """`steps()` is over at `step`, whose snapshot is READY and to be persisted as "final"."""

    step: int


# --- agent -> rank ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreFile:
    """
    A tensor file to restore from: path in the memory volume or on storage; `blocks` are crc32 of its 8 MiB
    blocks (empty: nothing to check against). Its entries are named by `Chunk.key`. `served`: its path in an object
    store; then the file at `path` has only the header, and the agent gives the blocks at a socket beside it.
    """

    path: str
    blocks: tuple[int, ...]
    nbytes: int
    served: str = ""
    checked: bool = False
    """The agent has compared all blocks with their checksums just now; whoever reads it need not again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """
    What the rank restores. `chunks_path`: a file with the chunk list (layout.json, or the manifest) that
    tells boxes apart; "" when source is BEGINNING. `record`: the rank's small record, None = reseed.
    """

    source: RestoreSource
    step: int = 0
    attempt: int = 0
    files: tuple[RestoreFile, ...] = ()
    chunks_path: str = ""
    record: RestoreFile | None = None
    shared_record: RestoreFile | None = None
    """Record of another rank at the same step, for what all ranks share, when `record` is provisional or missing."""
    other_records: tuple[RestoreFile, ...] = ()
    """Records of the other ranks, read only where the saved state was cut in another way than this rank's is now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcome:
    """Go: sent once the worker is prepared and the attempt's store is known."""

    attempt: int
    store_address: str
    restore: RestoreOrder
    plan: SnapshotPlan
    slots: int
    replicas: int = 0
    """Other workers that keep each part too."""
    lineage_parent: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """Stop at the next gate. `release_to`: updates until this step has been passed are allowed."""

    hold: int
    release_to: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """The holds up to `hold` are over."""

    hold: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyLive:
    """Copy the live state of `step` into these parts (rank -> slot)."""

    number: int
    step: int
    parts: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Say where all threads are."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewPlan:
    """Take this snapshot plan, if all ranks do so before its first step."""

    plan: SnapshotPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Persisted:
    """A checkpoint is committed (or, with `error`, its save failed)."""

    step: int
    attempt: int
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated:
    """The rank's own part of `step` is kept by other workers, or with `error` by fewer than it should be."""

    step: int
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MayExit:
    """Everything of this rank that can be kept is kept."""


KINDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        LauncherHello, Processes, StopRequested, RunRanks, RanksFound, StopRanks, EndLauncher,
        RankHello, LayoutReady, RecordWritten, Boundary, SnapshotReady, HoldState, LiveCopyDone, Stacks, ScriptEnded,
        RankNotice, Finished, Welcome, Hold, Release, CopyLive, DumpStacks, NewPlan, Persisted, Replicated, RecordKept,
        MayExit,
    )
}  # fmt: skip


def encode(message: Any) -> bytes:
    """One line."""
    plain = codec.to_plain(message)
    plain["kind"] = type(message).__name__
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The message of a line; DecodeError for an unknown kind or form (skip it, keep the connection)."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise codec.DecodeError(f"not JSON: {error}") from None
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if kind not in KINDS:
        raise codec.DecodeError(f"unknown kind {kind!r}")
    return codec.from_plain(KINDS[kind], data)
