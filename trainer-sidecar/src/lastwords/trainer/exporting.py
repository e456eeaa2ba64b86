"""
`python -m lastwords.trainer.exporting FOLDER OUT --format FORMAT`: a checkpoint in a form that other programs read.

FOLDER is one committed checkpoint on a file system. All forms have whole tensors, whatever the layout was:

    torch        OUT/state.pt: torch.save of {"step", <part>: state}; a model's state is what `load_state_dict` takes,
                 an optimizer's is {"state": {parameter's name: {...}}, "param_groups": [...]}
    dcp          OUT: the same by torch.distributed.checkpoint, which makes texts of all keys
    safetensors  OUT/<part>.safetensors with the tensors; OUT/state.json with the rest, types kept as in small records

The whole state is in memory for a while. Buffers that differ between ranks (BatchNorm) are the lowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from lastwords.protocol import chunks as chunks_
from lastwords.protocol import codec, manifest, tensorfile, wire
from lastwords.protocol.manifest import Manifest, StoredFile
from lastwords.protocol.messages import RestoreSource
from lastwords.trainer import hoststate, reading
from lastwords.trainer.collect import Live
from lastwords.trainer.reading import RestoreError
from lastwords.trainer.saved import Saved

FORMATS = ("torch", "dcp", "safetensors")


def read_state(folder: str) -> dict[str, Any]:
    """Everything in a checkpoint's folder, by part. Raises RestoreError."""
    path = os.path.join(folder, manifest.MANIFEST)
    try:
        with open(path, "rb") as file:
            found = manifest.decode_manifest(file.read())
    except (OSError, codec.DecodeError) as error:
        raise RestoreError(f"{path}: {error}") from None
    files = tuple(_file(folder, part.data) for part in found.parts if part.data is not None)
    tensors = _whole_tensors(found, files)
    saved = _records(folder, found)
    optimizers: dict[str, Any] = saved.shared["optimizers"]
    state: dict[str, Any] = {"step": found.plan.step}
    for name, groups in optimizers.items():
        state[name] = {"state": {}, "param_groups": groups}
    for name, tensor in sorted({**saved.own["buffers"], **tensors, **saved.own["extra"]}.items()):
        _place(state, optimizers, name, tensor)
    for name, value in saved.shared["values"].items():
        _place(state, optimizers, name, value)
    for name, first in saved.own["aliases"].items():
        if name.partition(".")[0] not in optimizers and (first in tensors or first in saved.own["buffers"]):
            _place(state, optimizers, name, tensors.get(first, saved.own["buffers"].get(first)))
    state.update(saved.shared["common"])
    return state


def _whole_tensors(found: Manifest, files: tuple[wire.RestoreFile, ...]) -> dict[str, torch.Tensor]:
    sources = reading.find_sources(files, found.plan.chunks)
    targets = {}
    for chunk in found.plan.chunks:
        if chunk.name not in targets:
            tensor = torch.empty(chunk.shape, dtype=getattr(torch, chunk.dtype))
            targets[chunk.name] = Live(chunks_.whole(chunk.name, chunk.dtype, chunk.shape), tensor, tensor)
    reading.fill(list(targets.values()), sources)
    return {name: live.tensor for name, live in targets.items()}


def _records(folder: str, found: Manifest) -> Saved:
    """What all small records say together; the lowest rank's where they differ."""
    files = [_file(folder, part.record) for part in found.parts if part.record is not None]
    final = next((file for file in files if not _is_provisional(file)), None)
    order = wire.RestoreOrder(
        source=RestoreSource.CHECKPOINT, record=files[0], shared_record=final, other_records=tuple(files[1:])
    )
    return Saved(order, -1, "")


def _is_provisional(file: wire.RestoreFile) -> bool:
    return hoststate.parse_record(pathlib.Path(file.path).read_bytes()).head.provisional


def _file(folder: str, stored: StoredFile) -> wire.RestoreFile:
    return wire.RestoreFile(path=os.path.join(folder, stored.name), blocks=stored.blocks, nbytes=stored.nbytes)


def _place(state: dict[str, Any], optimizers: Mapping[str, Any], name: str, value: Any) -> None:
    part, _, rest = name.partition(".")
    if part not in optimizers:
        state.setdefault(part, {})[rest] = value
    elif rest.startswith("state."):
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        state[part]["state"].setdefault(parameter, {})[key] = value
    else:
        state[part].setdefault("params", {})[rest.removeprefix("params.")] = value


# --- forms ------------------------------------------------------------------------------------------


def write(state: dict[str, Any], out: str, form: str) -> None:
    """Write what `read_state` gave into the folder `out`."""
    os.makedirs(out, exist_ok=True)
    if form == "torch":
        torch.save(state, os.path.join(out, "state.pt"))
    elif form == "dcp":
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=out, no_dist=True)
    else:
        _write_safetensors(state, out)


def _write_safetensors(state: dict[str, Any], out: str) -> None:
    rest: dict[str, Any] = {}
    for part, value in state.items():
        tensors, others = _split(value, "")
        if tensors:
            _write_tensors(os.path.join(out, f"{part}.safetensors"), tensors)
        if others or not tensors:
            rest[part] = others if isinstance(value, dict) else value
    encoded = hoststate.encode_part("state", rest)
    if encoded.table.arrays:
        raise RestoreError("tensors are in a list of the state, which safetensors cannot hold: use another format")
    pathlib.Path(out, "state.json").write_text(encoded.text)


def _split(value: Any, path: str) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """Tensors of nested dicts by dotted name, and all else."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[Any, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(item, torch.Tensor):
            tensors[name] = item
        elif isinstance(item, dict) and item:
            inner, left = _split(item, name)
            tensors |= inner
            if left or not inner:
                others[key] = left
        else:
            others[key] = item
    return tensors, others


def _write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    rows = [(name, hoststate.dtype_name(tensors[name].dtype), tuple(tensors[name].shape)) for name in order]
    header, _ = tensorfile.build_header(rows)
    with open(path, "wb") as file:
        file.write(header)
        for name in order:
            if tensors[name].numel():
                file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def main() -> int:
    """0, or 1 with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m lastwords.trainer.exporting")
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--format", choices=FORMATS, required=True)
    given = parser.parse_args()
    try:
        write(read_state(given.folder), given.out, given.format)
    except (RestoreError, OSError, json.JSONDecodeError) as error:
        print(f"lastwords: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
