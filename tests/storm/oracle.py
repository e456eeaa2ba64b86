"""
A second, deliberately plain answer to "which step should this attempt have been restored from?".

It reads the journal (what the coordinator had been told when it chose) and counts sets, chunk by chunk and rank by
rank, without the bitmasks, the piece queries or the restore planner of the product.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from lastwords.storage import checkpoints

Key = tuple[int, int]


def on_path(lineage: list[dict[str, int]], step: int, attempt: int) -> bool:
    """Whether (step, attempt) was on the path that led here: walk back from the newest entry, one attempt at a time."""
    entries = {entry["attempt"]: entry for entry in lineage}
    if not entries:
        return False
    current, upper = max(entries), float("inf")
    while True:
        entry = entries.get(current)
        lower = entry["step"] if entry else 0
        if attempt == current:
            return lower <= step <= upper
        if entry is None:
            return False
        upper = min(upper, entry["step"])
        current = entry["parent"]


def table_of(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest piece table that anybody reports."""
    tables = [report for report in reports if report.get("table")]
    if not tables:
        return None
    newest: dict[str, Any] = max(tables, key=lambda report: int(report["layout_attempt"]))["table"]
    return newest


def holders_on(mask: int, worker: int, procs: int) -> list[int]:
    """Ranks of a worker among the holders."""
    return [rank for rank in range(worker * procs, (worker + 1) * procs) if mask >> rank & 1]


def covered(table: dict[str, Any], ready: set[int]) -> bool:
    """
    Whether the ready parts (by rank) hold everything: each slice of each piece is in the part of the rank that is
    responsible for it on at least one worker.
    """
    workers, procs = table["topology"]["workers"], table["topology"]["processes_per_worker"]
    for piece in table["pieces"]:
        local = [holders_on(piece["holders"], worker, procs) for worker in range(workers)]
        slices = max(len(ranks) for ranks in local)
        for index in range(slices):
            responsible = {ranks[index % len(ranks)] for ranks in local if ranks}
            if not responsible & ready:
                return False
    return True


def memory_steps(line: dict[str, Any]) -> dict[Key, tuple[bool, bool]]:
    """For each (step, attempt) that memory covers: (covered, every rank has a record)."""
    reports = line["reports"]
    table = table_of(reports)
    if table is None:
        return {}
    world = table["topology"]["workers"] * table["topology"]["processes_per_worker"]
    parts: dict[Key, set[int]] = {}
    records: dict[Key, set[int]] = {}
    for report in reports:
        for part in report["parts"]:
            if part["generation"] == table["generation"] and part["finite"]:
                parts.setdefault((part["step"], part["attempt"]), set()).add(part["rank"])
        for record in report["records"]:
            records.setdefault((record["step"], record["attempt"]), set()).add(record["rank"])
    return {
        key: (True, records.get(key, set()) >= set(range(world)))
        for key, ready in parts.items()
        if covered(table, ready) and on_path(line["lineage"], *key)
    }


def expected(line: dict[str, Any]) -> tuple[str, int]:
    """(source, step) that the attempt of this journal line must start from."""
    memory = memory_steps(line)
    exact = [key[0] for key, (_, records) in memory.items() if records]
    stored = [
        info["id"]["step"]
        for report in line["reports"]
        for info in report["storage"]["checkpoints"]
        if not info["rejected"]
        and info["finite"]
        and on_path(line["lineage"], info["id"]["step"], info["id"]["attempt"])
    ]
    if exact and max(exact) >= max(stored, default=-1):
        return "memory", max(exact)
    if not exact and memory and max(key[0] for key in memory) >= max(stored, default=-1):
        return "memory", max(key[0] for key in memory)
    if stored:
        return "checkpoint", max(stored)
    return "beginning", 0


def check_journal(path: pathlib.Path) -> int:
    """Compare each choice with the oracle's; returns how many were compared."""
    compared = 0
    for text in path.read_text().splitlines():
        line = json.loads(text)
        plan = line["plan"]
        want = expected(line)
        got = (plan["source"], plan["step"])
        assert got == want, f"attempt {line['attempt']} started from {got}, the inventory allows {want}:\n{text[:4000]}"
        compared += 1
    assert compared, "the journal is empty"
    return compared


def check_checkpoints(storage: pathlib.Path) -> int:
    """Every committed checkpoint of every job in the folder verifies; returns how many there are."""
    found = 0
    for claim in storage.glob("*/*/job.json"):
        job = checkpoints.JobCheckpoints.at(str(storage), claim.parent.parent.name, claim.parent.name)
        for info in job.list_checkpoints():
            assert not info.rejected, f"{info.id.folder}: {info.rejected}"
            assert job.verify(info.id) == []
            found += 1
    assert found, f"no checkpoint in {storage}"
    return found
