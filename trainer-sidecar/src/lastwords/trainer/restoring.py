"""
Puts a state back: tensors in place, then host state, random numbers last.

Tensors are filled where they are, never replaced and never aliased to a file. Optimizer state that does not exist yet
is made first, as the source lists it. A source of another model is refused with what differs.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lastwords.protocol import codec, manifest, snapshots, tensorfile, wire
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.pieces import PieceTable
from lastwords.trainer import collect, hoststate, randomness, reading
from lastwords.trainer.collect import Collector
from lastwords.trainer.parts import Parts
from lastwords.trainer.reading import RestoreError, WrongModelError

log = logging.getLogger("lastwords")

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Restored:
    """What came of it. `exact` False: random numbers or loader position could not be restored; `note` says why."""

    exact: bool = True
    note: str = ""


def restore(order: wire.RestoreOrder, parts: Parts, collector: Collector, rank: int) -> Restored:
    """Carry out `order`. Raises RestoreError or WrongModelError; the process must not go on then."""
    if order.source is RestoreSource.BEGINNING:
        return Restored()
    chunks = read_chunks(order.chunks_path)
    sources = reading.find_sources(order.files, chunks)
    _make_optimizer_state(parts, collector, chunks)
    collector.rebuild()
    _compare(collector, chunks)
    reading.fill(collector.state.stable, sources)
    return _restore_host_state(order, parts, collector, rank)


def read_chunks(path: str) -> tuple[Chunk, ...]:
    """The chunk list of a checkpoint's manifest or of `layout.json`."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        if os.path.basename(path) == manifest.MANIFEST:
            return manifest.decode_manifest(data).plan.chunks
        return codec.loads(PieceTable, data, path).chunks
    except (OSError, codec.DecodeError) as error:
        raise RestoreError(f"{path}: {error}") from None


# --- tensors ----------------------------------------------------------------------------------------


def _make_optimizer_state(parts: Parts, collector: Collector, chunks: Sequence[Chunk]) -> None:
    """Give every optimizer the tensors that the source has for it, and take away those that it has not."""
    wanted: dict[str, dict[str, Chunk]] = {}
    for chunk in chunks:
        owner, _, key = chunk.name.rpartition(".")
        wanted.setdefault(owner, {})[key] = chunk
    for part, optimizer, name, parameter, group in collect.parameters_by_name(parts, collector.state):
        rows = wanted.get(f"{part}.state.{name}", {})
        have = optimizer.state.get(parameter, {})
        for key in [key for key, value in have.items() if isinstance(value, torch.Tensor) and key not in rows]:
            del have[key]
        for key, chunk in rows.items():
            if not isinstance(have.get(key), torch.Tensor) or have[key].dtype != getattr(torch, chunk.dtype):
                optimizer.state[parameter][key] = _empty_state(chunk, parameter, group)


def _empty_state(chunk: Chunk, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype)
    if chunk.shape == tuple(parameter.shape) and chunk.shape:
        # Same strides as torch's own optimizers give it.
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    on_device = chunk.shape or group.get("capturable") or group.get("fused")
    return torch.zeros(chunk.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _compare(collector: Collector, chunks: Sequence[Chunk]) -> None:
    theirs = {chunk.name: chunk for chunk in chunks}
    ours = {live.chunk.name: live.chunk for live in collector.state.stable}
    known = set(ours) | set(collector.state.aliases)
    missing = sorted(set(ours) - set(theirs))
    unexpected = sorted(set(theirs) - known)
    different = [
        f"{name} is {_form(theirs[name])} there and {_form(ours[name])} here"
        for name in sorted(set(ours) & set(theirs))
        if _form(theirs[name]) != _form(ours[name])
    ]
    if not (missing or unexpected or different):
        return
    lines = ["the saved state is of another model than this script builds"]
    lines += [f"not in the saved state: {_some(missing)}"] if missing else []
    lines += [f"only in the saved state: {_some(unexpected)}"] if unexpected else []
    lines += [_some(different, "; ")] if different else []
    lines.append("Start with the same model and the same parts, or with another storage folder")
    raise WrongModelError(". ".join(lines))


def _form(chunk: Chunk) -> str:
    return f"{chunk.dtype}{list(chunk.shape)}"


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more


# --- host state -------------------------------------------------------------------------------------


def _restore_host_state(order: wire.RestoreOrder, parts: Parts, collector: Collector, rank: int) -> Restored:
    own = _read(order.record)
    other = _read(order.shared_record)
    if own is not None and not own.head.provisional:
        shared_of = own
    elif other is not None:
        shared_of = other
    else:
        raise RestoreError("no small record with what all ranks share (schedulers, optimizer settings) was given")
    _load_shared(shared_of.part("shared"), parts, collector)
    own_rank = own is not None and own.head.rank == rank
    source = own if own is not None else other
    assert source is not None
    _load_own(source.part("own"), parts, collector, None if own_rank else (order.step, rank))
    if own_rank:
        return Restored()
    seed = randomness.reseed("lastwords", order.step, rank)
    note = f"rank {rank}: random numbers and loader position of step {order.step} are not kept; seeded anew with {seed}"
    return Restored(exact=False, note=note)


def _read(file: wire.RestoreFile | None) -> hoststate.Record | None:
    if file is None:
        return None
    try:
        with open(file.path, "rb") as stream:
            data = stream.read()
        if file.blocks and snapshots.block_checksums(data) != file.blocks:
            raise RestoreError(f"{file.path} is damaged (its checksum is not the one noted)")
        return hoststate.parse_record(data)
    except (OSError, codec.DecodeError, tensorfile.TensorFileError) as error:
        raise RestoreError(f"{file.path}: {error}") from None


def shared_state(parts: Parts, collector: Collector) -> dict[str, Any]:
    """What is equal on all ranks: optimizer settings and values, schedulers, scalers."""
    return {
        "optimizers": {name: _groups(optimizer) for name, optimizer in parts.optimizers.items()},
        "values": collector.optimizer_values(),
        "common": {name: value.state_dict() for name, value in parts.common.items()},
    }


def own_state(parts: Parts, collector: Collector) -> dict[str, Any]:
    """What may differ between ranks: random numbers, loaders, objects, buffers."""
    return {
        "random": randomness.capture(),
        "loaders": {name: position.state() for name, position in parts.loaders.items()},
        "objects": {name: value.state_dict() for name, value in parts.objects.items()},
        "extra": collector.extra_state(),
        "buffers": {name: tensor.detach() for name, tensor in collector.state.volatile.items()},
    }


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _load_shared(shared: dict[str, Any], parts: Parts, collector: Collector) -> None:
    _same_names("optimizers", shared["optimizers"], parts.optimizers)
    _same_names("schedulers and scalers", shared["common"], parts.common)
    for name, groups in shared["optimizers"].items():
        optimizer = parts.optimizers[name]
        if len(groups) != len(optimizer.param_groups):
            raise WrongModelError(
                f"{name} has {len(optimizer.param_groups)} parameter groups here and {len(groups)} in the saved state"
            )
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
    for part, optimizer, name, parameter, _ in collect.parameters_by_name(parts, collector.state):
        prefix = f"{part}.state.{name}."
        for full, value in shared["values"].items():
            if full.startswith(prefix) and "." not in full[len(prefix) :]:
                optimizer.state[parameter][full[len(prefix) :]] = value
    for name, value in shared["common"].items():
        parts.common[name].load_state_dict(value)


def _load_own(own: dict[str, Any], parts: Parts, collector: Collector, reseed: tuple[int, int] | None) -> None:
    _same_names("objects", own["objects"], parts.objects)
    _same_names("loaders", own["loaders"], parts.loaders)
    _same_names("buffers", own["buffers"], {**collector.state.volatile, **collector.state.aliases}, subset=True)
    for name, value in own["objects"].items():
        parts.objects[name].load_state_dict(value)
    collector.load_extra_state(own["extra"])
    with torch.no_grad():
        for name, value in own["buffers"].items():
            target = collector.state.volatile[name]
            if (target.shape, target.dtype) != (value.shape, value.dtype):
                raise WrongModelError(
                    f"{name} is {value.dtype}{list(value.shape)} in the saved state "
                    f"and {target.dtype}{list(target.shape)} here"
                )
            target.copy_(value)
    for name, state in own["loaders"].items():
        parts.loaders[name].load(state, reseed=reseed)
    if reseed is None:
        # Last: whatever was loaded before may have drawn random numbers.
        randomness.restore(own["random"])


def _same_names(what: str, theirs: Iterable[str], ours: Iterable[str], *, subset: bool = False) -> None:
    missing, unexpected = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if unexpected or (missing and not subset):
        raise WrongModelError(
            f"the saved state has other {what} than this script gives to the Checkpointer: "
            f"missing there {_some(missing) or 'none'}, only there {_some(unexpected) or 'none'}"
        )
