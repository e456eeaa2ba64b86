"""A JobView as text: rich renderables for a terminal, plain lines for everything else."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lastwords_operator.view.model import EventView, JobView, RankView, RecoveryView, WorkerView

LOG_LINES = 8
EVENT_LINES = 10
_STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "complete": "bold green",
    "starting": "yellow",
    "gathering": "yellow",
    "lastwords": "bold yellow",
    "recovering": "yellow",
    "errored": "bold red",
    "exited": "bold red",
    "failed": "bold red",
}


def live(view: JobView, log: Sequence[str]) -> RenderableType:
    """The whole live view."""
    parts: list[RenderableType] = [_header(view), workers_table(view.workers)]
    if view.recoveries:
        parts.append(recoveries_table(view.recoveries[-5:]))
    if view.events:
        parts.append(Panel(_events(view.events[-EVENT_LINES:]), title="events", title_align="left", padding=(0, 1)))
    if log:
        text = Text("\n".join(log[-LOG_LINES:]), no_wrap=True, overflow="ellipsis")
        parts.append(Panel(text, title="output", title_align="left", padding=(0, 1)))
    return Group(*parts)


def _header(view: JobView) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    state = Text(view.state, style=_STATE_STYLES.get(view.state.lower(), ""))
    row: list[RenderableType] = [Text(view.name, style="bold"), state, f"attempt {view.attempt}"]
    row += [f"step {number(view.step)}", f"loss {loss(view.loss)}"]
    row += [f"snapshot {number(view.snapshot_step)}", f"checkpoint {number(view.checkpoint_step)}"]
    row.append(duration(view.at - view.started_at) if view.started_at else "")
    grid.add_row(*row)
    lines: list[RenderableType] = [grid]
    if view.reason:
        lines.append(Text(view.reason, style="dim"))
    if view.cold_start:
        lines.append(Text(view.cold_start, style="dim"))
    if view.storage_error:
        lines.append(Text(f"saving fails, training goes on: {view.storage_error}", style="bold red"))
    return Panel(Group(*lines), title="lastwords", title_align="left", padding=(0, 1))


def workers_table(workers: Iterable[WorkerView]) -> Table:
    """Workers and their ranks."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("worker", "agent", "launcher", "rank", "state", "step", "loss", "doing"):
        table.add_column(name, header_style="dim")
    for worker in workers:
        agent = _process(worker.agent_pid, worker.agent_restarts)
        if worker.agent_pid and not worker.connected:
            agent += " (not connected)"
        first = [str(worker.worker), agent, _process(worker.launcher_pid, worker.launcher_restarts)]
        for rank in worker.ranks or (None,):
            table.add_row(*first, *(_rank_cells(rank) if rank else ["", "no ranks"]))
            first = ["", "", ""]
    return table


def _rank_cells(rank: RankView) -> list[str]:
    style = _STATE_STYLES.get(rank.state, "")
    state = f"[{style}]{rank.state}[/{style}]" if style else rank.state
    doing = [rank.phase] if rank.phase else []
    if rank.held:
        doing.append("held")
    if rank.quiet_seconds >= 1:
        doing.append(f"quiet for {rank.quiet_seconds:.0f} s")
    return [str(rank.rank), state, number(rank.step), loss(rank.loss), escape(", ".join(doing))]


def _process(pid: int, restarts: int) -> str:
    text = str(pid) if pid else "-"
    return f"{text}, {restarts} restart{'s' * (restarts != 1)}" if restarts else text


def recoveries_table(recoveries: Iterable[RecoveryView]) -> Table:
    """One row for each fault: what was kept and how long it took."""
    table = Table(title="recoveries", title_justify="left", pad_edge=False, header_style="dim")
    for name in ("#", "fault", "kept", "from", "lost", "exact", "time line (ms after the fault)"):
        table.add_column(name)
    for row in recoveries:
        line = " → ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in row.phases)
        lost = "" if row.steps_lost is None else f"{row.steps_lost} step{'s' * (row.steps_lost != 1)}"
        kept = "" if row.step is None else f"step {row.step}"
        exact = ("yes" if row.exact else "[bold red]no[/bold red]") if row.source else ""
        table.add_row(str(row.number), escape(row.fault), kept, row.source, lost, exact, line or "…")
    return table


def _events(events: Iterable[EventView]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for index, event in enumerate(events):
        text.append("\n" if index else "")
        text.append(f"{clock(event.at)} ", style="dim")
        text.append(f"{event.kind} ", style="bold red" if event.warning else "bold")
        text.append(event.text.splitlines()[0] if event.text else "")
    return text


def summary(view: JobView) -> RenderableType:
    """What is said at the end."""
    table = Table.grid(padding=(0, 2))
    table.add_row("job", view.name)
    table.add_row("result", Text(view.state, style=_STATE_STYLES.get(view.state.lower(), "")))
    if view.reason:
        table.add_row("", escape(view.reason))
    table.add_row("step", number(view.step))
    table.add_row("time", duration(view.at - view.started_at) if view.started_at else "-")
    table.add_row("faults survived", str(sum(1 for row in view.recoveries if row.done)))
    lost = [row.steps_lost for row in view.recoveries if row.steps_lost is not None]
    table.add_row("steps lost", str(sum(lost)))
    table.add_row("newest checkpoint", number(view.checkpoint_step))
    table.add_row("folder", escape(view.folder))
    if view.cold_start:
        table.add_row("restarts", escape(view.cold_start))
    parts: list[RenderableType] = [table]
    if view.recoveries:
        parts.append(recoveries_table(view.recoveries))
    if view.traceback:
        parts.append(Text(view.traceback.rstrip()))
    return Group(*parts)


def plain_event(event: EventView) -> str:
    """One event as one line or, with a traceback, several."""
    return f"{clock(event.at)} {event.kind}: {event.text}"


def plain_progress(view: JobView) -> str:
    """One line that says where the job is."""
    parts = [f"{clock(view.at)} {view.state}: attempt {view.attempt}, step {number(view.step)}"]
    if view.loss is not None:
        parts.append(f"loss {loss(view.loss)}")
    parts.append(f"snapshot {number(view.snapshot_step)}, checkpoint {number(view.checkpoint_step)}")
    return ", ".join(parts)


def to_text(renderable: RenderableType, width: int = 120) -> str:
    """Without colours."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def number(value: int | None) -> str:
    """A number, or a dash."""
    return "-" if value is None else str(value)


def loss(value: float | None) -> str:
    """A loss, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def clock(at: float) -> str:
    """Local time of day with milliseconds."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def duration(seconds: float) -> str:
    """Seconds, minutes, hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
