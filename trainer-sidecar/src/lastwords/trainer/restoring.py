"""
Puts a state back: tensors in place, then host state, random numbers last.

Tensors are filled where they are, never replaced and never aliased to a file; of a sharded one this process fills its
shard. Optimizer state that does not exist yet is made first, as the source lists it, and so are parameter groups that
the script adds on its way. A source of another model is refused with what differs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lastwords.protocol import codec, manifest, wire
from lastwords.protocol.chunks import Chunk
from lastwords.protocol.messages import RestoreSource
from lastwords.protocol.pieces import PieceTable
from lastwords.trainer import collect, copying, randomness, reading
from lastwords.trainer.collect import Collector
from lastwords.trainer.parts import Parts
from lastwords.trainer.reading import RestoreError, Source, WrongModelError
from lastwords.trainer.saved import Saved

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Restored:
    """What came of it. `exact` False: random numbers or loader position could not be restored; `note` says why."""

    exact: bool = True
    note: str = ""
    elsewhere: frozenset[str] = frozenset()
    """Tensors of the source that this rank does not have: some other rank must."""
    thawed: bool = False
    """Parameters are trained or frozen otherwise than the script built them."""


def restore(order: wire.RestoreOrder, parts: Parts, collector: Collector, rank: int, *, alone: bool = True) -> Restored:
    """
    Carry out `order`. `alone`: no other rank holds tensors that this one has not.

    Raises RestoreError or WrongModelError; the process must not go on then.
    """
    if order.source is RestoreSource.BEGINNING:
        return Restored()
    chunks: Sequence[Chunk] = read_chunks(order.chunks_path)
    saved = Saved(order, rank, collector.state.listing)
    thawed = _thaw(saved, collector)
    _add_groups(saved, parts, collector)
    # Names that the saved state kept once, because the tensors were tied, and that are two tensors here.
    doubled = _untied(saved, parts, collector, chunks)
    sources = reading.find_sources(order.files, chunks)
    sources |= {name: _renamed(sources.get(first, ()), name) for name, first in doubled.items()}
    by_name = {chunk.name: chunk for chunk in chunks}
    chunks = [*chunks, *(dataclasses.replace(by_name[first], name=name) for name, first in doubled.items())]
    _make_optimizer_state(parts, collector, chunks)
    collector.rebuild()
    elsewhere = _compare(collector, chunks, alone=alone)
    reading.fill(collector.state.stable, sources)
    _check_tied(collector, sources)
    restored = _restore_host_state(order, saved, parts, collector, rank, alone=alone)
    return dataclasses.replace(restored, elsewhere=elsewhere, thawed=thawed)


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


def other_model(*differences: str) -> str:
    """What a user is told of a state that does not fit the script."""
    return ". ".join(
        [
            "the saved state is of another model than this script builds",
            *differences,
            "Start with the same model and the same parts, or with another storage folder",
        ]
    )


def only_there(names: Iterable[str]) -> str:
    """One of those differences."""
    return f"only in the saved state: {some(sorted(names))}"


def some(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more


# --- what the script changes on its way --------------------------------------------------------------


def _thaw(saved: Saved, collector: Collector) -> bool:
    """Train and freeze parameters as the run did: a script does that once, in a step that is not done again."""
    changed = False
    for name, trained in saved.own["thawed"].items():
        parameter = collector.state.parameters.get(name)
        if parameter is not None and parameter.requires_grad != trained:
            parameter.requires_grad_(trained)
            changed = True
    return changed


def _add_groups(saved: Saved, parts: Parts, collector: Collector) -> None:
    """Parameter groups that the script had added by then, with the parameters that had been added."""
    _same_names("optimizers", saved.shared["optimizers"], parts.optimizers)
    for name, groups in saved.shared["optimizers"].items():
        optimizer, added = parts.optimizers[name], saved.own["added"].get(name, [])
        here = len(optimizer.param_groups)
        if here > len(groups):
            raise WrongModelError(
                f"{name} has {here} parameter groups here and {len(groups)} in the saved state. A group that the "
                "script adds in a later step must be added in that step only, not before the Checkpointer is made"
            )
        for index in range(here, len(groups)):
            names = added[index - len(groups)] if len(groups) - index <= len(added) else []
            found = [collector.state.parameters[n] for n in names if n in collector.state.parameters]
            if not found:
                what = f", with {some(names)}, which are not in the model here" if names else ""
                raise WrongModelError(
                    f"{name} has {here} parameter groups here and {len(groups)} in the saved state{what}. "
                    "Build the optimizer with the same groups, or start with another storage folder"
                )
            optimizer.add_param_group({"params": found, **groups[index]})


def _changes(parts: Parts, collector: Collector) -> dict[str, Any]:
    """What `_thaw` and `_add_groups` need."""
    state, born = collector.state, collector.born
    names = state.parameter_names
    added = {
        part: [[names[id(parameter)] for parameter in group["params"]] for group in groups[born.groups[part] :]]
        for part, groups in ((part, optimizer.param_groups) for part, optimizer in parts.optimizers.items())
        if len(groups) > born.groups[part]
    }
    trained = {name: parameter.requires_grad for name, parameter in state.parameters.items()}
    same = trained == born.trainable  # at every boundary: the short way
    thawed = {} if same else {n: now for n, now in trained.items() if now != born.trainable.get(n, now)}
    return {"added": added, "thawed": thawed, "aliases": state.aliases, "listing": state.listing}


# --- tensors ----------------------------------------------------------------------------------------


def _untied(saved: Saved, parts: Parts, collector: Collector, chunks: Sequence[Chunk]) -> dict[str, str]:
    """Tensors (and optimizer state) that are kept under another name, since they were tied -> that name."""
    there = {chunk.name for chunk in chunks}
    found: dict[str, str] = {}
    for alias, first in saved.own["aliases"].items():
        if alias in collector.state.parameters and alias not in there and first in there:
            found[alias] = first
            for part in parts.optimizers:
                prefix = f"{part}.state.{first}."
                for name in there:
                    if name.startswith(prefix) and "." not in name[len(prefix) :]:
                        found[f"{part}.state.{alias}.{name[len(prefix) :]}"] = name
    return found


def _renamed(sources: Iterable[Source], name: str) -> list[Source]:
    return [dataclasses.replace(source, chunk=dataclasses.replace(source.chunk, name=name)) for source in sources]


def _check_tied(collector: Collector, sources: Mapping[str, list[Source]]) -> None:
    """What is one tensor here may be two in the source only if they are equal (as in stages of a pipeline)."""
    stable = {live.chunk.name: live for live in collector.state.stable}
    for alias, first in collector.state.aliases.items():
        live = stable.get(first)
        if live is None or alias not in sources:
            continue
        second = dataclasses.replace(
            live, chunk=dataclasses.replace(live.chunk, name=alias), local=torch.empty_like(live.local)
        )
        reading.fill([second], sources)
        if copying.bytes_of(second.local) != copying.bytes_of(live.local):
            raise WrongModelError(
                f"{alias} and {first} are one tensor here (tied), but two different ones in the saved state. "
                "Build the model without tying them, or start with another storage folder"
            )


def _make_optimizer_state(parts: Parts, collector: Collector, chunks: Sequence[Chunk]) -> None:
    """Give every optimizer the tensors that the source has for it, and take away those that it has not."""
    wanted: dict[str, dict[str, Chunk]] = {}
    for chunk in chunks:
        owner, _, key = chunk.name.rpartition(".")
        wanted.setdefault(owner, {})[key] = chunk
    for part, state, name, parameter, group in collect.parameters_by_name(parts, collector.state):
        rows = wanted.get(f"{part}.state.{name}", {})
        have = state.get(parameter, {})
        for key in [key for key, value in have.items() if isinstance(value, torch.Tensor) and key not in rows]:
            del have[key]
        for key, chunk in rows.items():
            if not isinstance(have.get(key), torch.Tensor) or have[key].dtype != getattr(torch, chunk.dtype):
                state[parameter][key] = _empty_state(chunk, parameter, group)


def _empty_state(chunk: Chunk, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype)
    if chunk.shape == tuple(parameter.shape) and chunk.shape:
        # Same strides as torch's own optimizers give it, and of a sharded parameter the same shards.
        # Not filled, since the source has every value of it: that would touch all its memory once more.
        return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    if chunk.shape and collect.is_sharded(parameter):
        # State of another shape (a value per row, say) is whole on all ranks of the parameter's mesh.
        return parameter.detach().new_zeros(chunk.shape, dtype=dtype)
    on_device = chunk.shape or group.get("capturable") or group.get("fused")
    return torch.zeros(chunk.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _compare(collector: Collector, chunks: Sequence[Chunk], *, alone: bool) -> frozenset[str]:
    """Raises WrongModelError for what does not fit; returns what only other ranks can have."""
    theirs = {chunk.name: chunk for chunk in chunks}
    ours = {live.chunk.name: live.chunk for live in collector.state.stable}
    known = set(ours) | set(collector.state.aliases) | collector.state.empty
    missing = sorted(set(ours) - set(theirs))
    unexpected = frozenset(theirs) - known
    different = [
        f"{name} is {_form(theirs[name])} there and {_form(ours[name])} here"
        for name in sorted(set(ours) & set(theirs))
        if _form(theirs[name]) != _form(ours[name])
    ]
    refused = unexpected if alone or missing or different else frozenset[str]()
    if missing or refused or different:
        lines = [f"not in the saved state: {some(missing)}"] if missing else []
        lines += [only_there(refused)] if refused else []
        lines += [some(different, "; ")] if different else []
        raise WrongModelError(other_model(*lines))
    return unexpected


def _form(chunk: Chunk) -> str:
    return f"{chunk.dtype}{list(chunk.shape)}"


# --- host state -------------------------------------------------------------------------------------


def _restore_host_state(
    order: wire.RestoreOrder, saved: Saved, parts: Parts, collector: Collector, rank: int, *, alone: bool
) -> Restored:
    _load_shared(saved, parts, collector, rank)
    _load_own(saved, parts, collector, None if saved.is_own else (order.step, rank), alone=alone)
    if saved.is_own:
        return Restored()
    seed = randomness.reseed("lastwords", order.step, rank)
    note = f"rank {rank}: random numbers and loader position of step {order.step} are not kept; seeded anew with {seed}"
    return Restored(exact=False, note=note)


def shared_state(parts: Parts, collector: Collector) -> dict[str, Any]:
    """What is equal on all ranks: optimizer settings and values, schedulers, scalers."""
    return {
        "optimizers": {name: _groups(optimizer) for name, optimizer in parts.optimizers.items()},
        "values": collector.optimizer_values(),
        "common": {name: value.state_dict() for name, value in parts.common.items()},
    }


def own_state(parts: Parts, collector: Collector) -> dict[str, Any]:
    """What may differ between ranks: random numbers, loaders, objects, buffers, and what the script changed."""
    return {
        "random": randomness.capture(),
        "loaders": {name: position.state() for name, position in parts.loaders.items()},
        "objects": {name: value.state_dict() for name, value in parts.objects.items()},
        "extra": collector.extra_state(),
        "buffers": {name: tensor.detach() for name, tensor in collector.state.volatile.items()},
        **_changes(parts, collector),
    }


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _load_shared(saved: Saved, parts: Parts, collector: Collector, rank: int) -> None:
    shared = saved.shared
    _same_names("schedulers and scalers", shared["common"], parts.common)
    for name, groups in shared["optimizers"].items():
        for group, settings in zip(parts.optimizers[name].param_groups, groups, strict=True):
            for key, value in settings.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
    _load_values(saved, parts, collector, rank)
    for name, value in shared["common"].items():
        parts.common[name].load_state_dict(value)


def _load_values(saved: Saved, parts: Parts, collector: Collector, rank: int) -> None:
    """Optimizer state that is no tensor."""
    by_owner: dict[str, dict[str, Any]] = {}
    for full, value in saved.shared["values"].items():
        owner, _, key = full.rpartition(".")
        by_owner.setdefault(owner, {})[key] = value
    owners = set()
    for part, state, name, parameter, _ in collect.parameters_by_name(parts, collector.state):
        owners.add(owner := f"{part}.state.{name}")
        for key, value in by_owner.get(owner, {}).items():
            state[parameter][key] = value
    if by_owner and not owners & set(by_owner) and saved.settings_rank != rank:
        raise RestoreError(
            f"the optimizer of rank {rank} has values of its own (such as a count of updates that is no tensor), "
            f"and the record that was given is of rank {saved.settings_rank}, which holds other parameters"
        )


def _load_own(saved: Saved, parts: Parts, collector: Collector, reseed: tuple[int, int] | None, *, alone: bool) -> None:
    own = saved.own
    _same_names("objects", own["objects"], parts.objects)
    _same_names("loaders", own["loaders"], parts.loaders)
    buffers = {**collector.state.volatile, **collector.state.aliases}
    if alone or saved.same_names:
        _same_names("buffers", own["buffers"], buffers, subset=True)
    for name, value in own["objects"].items():
        parts.objects[name].load_state_dict(value)
    collector.load_extra_state(own["extra"])
    with torch.no_grad():
        for name in own["buffers"].keys() & collector.state.volatile.keys():
            value, target = own["buffers"][name], collector.state.volatile[name]
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
            f"missing there {some(missing) or 'none'}, only there {some(unexpected) or 'none'}"
        )
