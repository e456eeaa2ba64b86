"""
Host state as JSON with types kept, and the small record it travels in. No pickle: loading never runs code.

Plain JSON values stand as they are; everything else is {"$": tag, ...}. Tensors and arrays lie in a side table and
become entries of the record's tensor file. What cannot be kept is refused with its path.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lastwords.protocol import codec, snapshots, tensorfile

_EXACT_INT = 1 << 53
_FACTORIES: dict[str, type] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}


class HostStateError(TypeError):
    """A value that cannot be kept; the text names its path and type."""


@dataclasses.dataclass
class Table:
    """Tensors and arrays of one record, by name."""

    arrays: dict[str, tuple[str, tuple[int, ...], memoryview]] = dataclasses.field(default_factory=dict)
    """name -> (dtype, shape, bytes)"""

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of `tensor`."""
        plain = tensor.detach()
        if plain.is_contiguous() and plain.device.type == "cpu":
            plain = plain.clone()
        else:
            plain = plain.cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
        self.arrays[name] = (dtype_name(tensor.dtype), tuple(tensor.shape), memoryview(data))

    def add_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Keep a copy of `array`, whose type must be one that tensor files have."""
        data = memoryview(np.array(array, order="C", copy=True).reshape(-1).view(np.uint8).data)
        self.arrays[name] = (array.dtype.name, tuple(array.shape), data)

    def tensor(self, name: str) -> torch.Tensor:
        """A fresh tensor; KeyError when the table has no such name."""
        dtype, shape, data = self.arrays[name]
        result = torch.empty(shape, dtype=getattr(torch, dtype))
        if result.numel():
            result.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        return result

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A fresh array; KeyError when the table has no such name."""
        dtype, shape, data = self.arrays[name]
        if not len(data):
            return np.empty(shape, dtype=np.dtype(dtype))
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()


def dtype_name(dtype: torch.dtype) -> str:
    """The name that tensor files use; KeyError when they have no such type."""
    name = str(dtype).removeprefix("torch.")
    if name not in tensorfile.DTYPES:
        raise KeyError(name)
    return name


# --- encode -----------------------------------------------------------------------------------------


def encode(value: Any, table: Table, path: str) -> Any:
    """`value` as plain JSON; tensors go to `table` under their path. Raises HostStateError."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT_INT < value < _EXACT_INT else {"$": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": np.float64(value).tobytes().hex()}
    if kind is list:
        return [encode(item, table, f"{path}[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, table, path)
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, table, path)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _encode_tensor(value, table, path)
    if isinstance(value, np.generic):
        _numpy_dtype(value.dtype, path)
        return {"$": "npscalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
    raise HostStateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved. Leave it out of the object's "
        "state_dict, or turn it into numbers, strings, lists, dicts, arrays or tensors"
    )


def _encode_dict(value: dict[Any, Any], table: Table, path: str) -> Any:
    if all(type(key) is str for key in value) and "$" not in value:
        return {key: encode(item, table, f"{path}.{key}") for key, item in value.items()}
    return {"$": "dict", "v": _pairs(value, table, path)}


def _pairs(value: Mapping[Any, Any], table: Table, path: str) -> list[Any]:
    return [
        [encode(key, table, f"{path}.<key {index}>"), encode(item, table, f"{path}[{key!r:.60}]")]
        for index, (key, item) in enumerate(value.items())
    ]


def _encode_items(tag: str) -> Callable[[Any, Table, str], Any]:
    def encode_items(value: Any, table: Table, path: str) -> Any:
        return {"$": tag, "v": [encode(item, table, f"{path}[{index}]") for index, item in enumerate(value)]}

    return encode_items


def _encode_set(tag: str) -> Callable[[Any, Table, str], Any]:
    def encode_set(value: Any, table: Table, path: str) -> Any:
        items = [encode(item, table, f"{path}.<item>") for item in value]
        return {"$": tag, "v": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}

    return encode_set


def _encode_mapping(tag: str) -> Callable[[Any, Table, str], Any]:
    return lambda value, table, path: {"$": tag, "v": _pairs(value, table, path)}


def _encode_defaultdict(value: Any, table: Table, path: str) -> Any:
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise HostStateError(f"{path} is a defaultdict with the factory {factory!r}, which cannot be saved")
    return {"$": "defaultdict", "factory": name, "v": _pairs(value, table, path)}


def _encode_deque(value: Any, table: Table, path: str) -> Any:
    return {**_encode_items("deque")(value, table, path), "maxlen": value.maxlen}


def _encode_array(value: np.ndarray[Any, Any], table: Table, path: str) -> Any:
    name = _numpy_dtype(value.dtype, path)
    if name in tensorfile.DTYPES and value.dtype.isnative:
        table.add_array(path, value)
        return {"$": "ndarray", "v": path}
    raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$": "ndarray64", "dtype": value.dtype.str, "shape": list(value.shape), "v": raw}


def _numpy_dtype(dtype: np.dtype[Any], path: str) -> str:
    if dtype.hasobject or dtype.names:
        raise HostStateError(f"{path} is an array of {dtype}, which cannot be saved: it must be of numbers or text")
    return dtype.name


def _encode_tensor(value: torch.Tensor, table: Table, path: str) -> Any:
    if value.layout != torch.strided or value.is_quantized:
        raise HostStateError(f"{path} is a {value.layout} tensor, which cannot be saved: only dense ones can")
    try:
        table.add_tensor(path, value)
    except KeyError as error:
        raise HostStateError(f"{path} is a tensor of {error.args[0]}, which cannot be saved") from None
    plain: dict[str, Any] = {"$": "tensor", "v": path}
    if value.device.type != "cpu":
        plain["device"] = str(value.device)
    return plain


_ENCODERS: dict[type, Callable[[Any, Table, str], Any]] = {
    tuple: _encode_items("tuple"),
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    collections.OrderedDict: _encode_mapping("ordereddict"),
    collections.Counter: _encode_mapping("counter"),
    collections.defaultdict: _encode_defaultdict,
    collections.deque: _encode_deque,
    np.ndarray: _encode_array,
    bytes: lambda value, _table, _path: {"$": "bytes", "v": base64.b64encode(value).decode()},
    bytearray: lambda value, _table, _path: {"$": "bytearray", "v": base64.b64encode(value).decode()},
    complex: lambda value, table, path: {
        "$": "complex",
        "v": [encode(x, table, path) for x in (value.real, value.imag)],
    },
    range: lambda value, _table, _path: {"$": "range", "v": [value.start, value.stop, value.step]},
    torch.Size: lambda value, _table, _path: {"$": "size", "v": list(value)},
    torch.dtype: lambda value, _table, _path: {"$": "dtype", "v": str(value).removeprefix("torch.")},
    torch.device: lambda value, _table, _path: {"$": "device", "v": str(value)},
}


# --- decode -----------------------------------------------------------------------------------------


def decode(plain: Any, table: Table) -> Any:
    """The value again, with its types. Raises DecodeError for a form that this version does not know."""
    if isinstance(plain, list):
        return [decode(item, table) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = plain.get("$")
    if tag is None:
        return {key: decode(item, table) for key, item in plain.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise codec.DecodeError(f"host state: unknown tag {tag!r}")
    return decoder(plain, table)


def _items(plain: Any, table: Table) -> list[Any]:
    return [decode(item, table) for item in plain["v"]]


def _decode_pairs(plain: Any, table: Table) -> list[tuple[Any, Any]]:
    return [(decode(key, table), decode(item, table)) for key, item in plain["v"]]


def _decode_array64(plain: Any, _table: Table) -> Any:
    raw, dtype = base64.b64decode(plain["v"]), np.dtype(plain["dtype"])
    return np.frombuffer(raw, dtype=dtype).reshape(plain["shape"]).copy() if raw else np.empty(plain["shape"], dtype)


def _decode_tensor(plain: Any, table: Table) -> torch.Tensor:
    tensor = table.tensor(plain["v"])
    return tensor.to(plain["device"]) if "device" in plain else tensor


def _decode_defaultdict(plain: Any, table: Table) -> Any:
    factory = _FACTORIES[plain["factory"]] if plain["factory"] else None
    return collections.defaultdict(factory, _decode_pairs(plain, table))


def _decode_dtype(plain: Any, _table: Table) -> torch.dtype:
    dtype = getattr(torch, plain["v"], None)
    if not isinstance(dtype, torch.dtype):
        raise codec.DecodeError(f"host state: unknown dtype {plain['v']!r}")
    return dtype


_DECODERS: dict[str, Callable[[Any, Table], Any]] = {
    "int": lambda plain, _table: int(plain["v"], 16),
    "float": lambda plain, _table: float(np.frombuffer(bytes.fromhex(plain["v"]), dtype=np.float64)[0]),
    "complex": lambda plain, table: complex(*_items(plain, table)),
    "tuple": lambda plain, table: tuple(_items(plain, table)),
    "set": lambda plain, table: set(_items(plain, table)),
    "frozenset": lambda plain, table: frozenset(_items(plain, table)),
    "dict": lambda plain, table: dict(_decode_pairs(plain, table)),
    "ordereddict": lambda plain, table: collections.OrderedDict(_decode_pairs(plain, table)),
    "counter": lambda plain, table: collections.Counter(dict(_decode_pairs(plain, table))),
    "defaultdict": _decode_defaultdict,
    "deque": lambda plain, table: collections.deque(_items(plain, table), plain["maxlen"]),
    "bytes": lambda plain, _table: base64.b64decode(plain["v"]),
    "bytearray": lambda plain, _table: bytearray(base64.b64decode(plain["v"])),
    "range": lambda plain, _table: range(*plain["v"]),
    "size": lambda plain, _table: torch.Size(plain["v"]),
    "dtype": _decode_dtype,
    "device": lambda plain, _table: torch.device(plain["v"]),
    "ndarray": lambda plain, table: table.array(plain["v"]),
    "ndarray64": _decode_array64,
    "npscalar": lambda plain, _table: np.frombuffer(bytes.fromhex(plain["v"]), dtype=np.dtype(plain["dtype"]))[0],
    "tensor": _decode_tensor,
}


# --- records ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One of a record's two parts, ready to be written."""

    text: str
    table: Table

    def same_as(self, other: Encoded) -> bool:
        """Byte for byte the same state."""
        return self.text == other.text and self.table.arrays == other.table.arrays


def encode_part(name: str, value: Any) -> Encoded:
    """`value` under the name "own" or "shared"."""
    table = Table()
    plain = encode(value, table, name)
    return Encoded(json.dumps(plain, separators=(",", ":"), allow_nan=False), table)


def build_record(head: snapshots.RecordHead, own: Encoded, shared: Encoded) -> bytes:
    """Bytes of the tensor file."""
    arrays = {**own.table.arrays, **shared.table.arrays}
    order = sorted(arrays, key=lambda name: (-tensorfile.item_bytes(arrays[name][0]), name))
    metadata = {"head": codec.dumps(head).decode(), "own": own.text, "shared": shared.text}
    header, _ = tensorfile.build_header([(n, arrays[n][0], arrays[n][1]) for n in order], metadata)
    return b"".join([header, *(arrays[name][2] for name in order)])


@dataclasses.dataclass(frozen=True)
class Record:
    """A small record, read."""

    head: snapshots.RecordHead
    metadata: dict[str, str]
    table: Table

    def part(self, name: str) -> Any:
        """Decode "own" or "shared"."""
        try:
            return decode(json.loads(self.metadata[name]), self.table)
        except (KeyError, ValueError, TypeError) as error:
            raise codec.DecodeError(f"small record, {name}: {error!r}") from None


def parse_record(data: bytes | memoryview) -> Record:
    """Raises TensorFileError or DecodeError for anything that is not a whole record."""
    view = memoryview(data)
    need = tensorfile.header_bytes(bytes(view[:8]))
    entries, metadata = tensorfile.parse_header(bytes(view[:need]), len(view))
    arrays = {e.name: (e.dtype, e.shape, view[e.begin : e.end]) for e in entries}
    return Record(codec.loads(snapshots.RecordHead, metadata.get("head", ""), "record head"), metadata, Table(arrays))
