"""
Dataclasses to plain JSON values and back.

Unknown keys are ignored and missing keys take the field's default, so that an operator of version N can
speak with agents of version N-1. A value of the wrong type is a `DecodeError` that names the path.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, TypeVar, Union

T = TypeVar("T")


class DecodeError(ValueError):
    """A message or file does not have the form it should have; the text names the path."""


def to_plain(value: Any) -> Any:
    """Return `value` as something that `json.dumps` takes: dataclass to dict, tuple to list, enum to its value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, path: str = "") -> T:
    """Build a `cls` (dataclass, or any annotation made of the forms used here) from plain JSON values."""
    return typing.cast(T, _decode(cls, data, path or cls.__name__))


def dumps(value: Any) -> bytes:
    """One canonical JSON text (sorted keys, no spaces): equal values give equal bytes."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def loads(cls: type[T], text: bytes | str, path: str = "") -> T:
    """Parse JSON text into a `cls`; `DecodeError` for anything else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DecodeError(f"{path or cls.__name__}: not JSON ({error})") from None
    return from_plain(cls, data, path)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        options = typing.get_args(kind)
        if data is None:
            if type(None) in options:
                return None
            raise DecodeError(f"{path}: missing")
        rest = [option for option in options if option is not type(None)]
        return _decode(rest[0], data, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), data, path)
    if origin is dict:
        key_kind, item_kind = typing.get_args(kind)
        if not isinstance(data, dict):
            raise DecodeError(f"{path}: expected an object, got {type(data).__name__}")
        return {key_kind(key): _decode(item_kind, item, f"{path}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            allowed = ", ".join(str(item.value) for item in kind)
            raise DecodeError(f"{path}: {data!r} is not one of {allowed}") from None
    return _decode_scalar(kind, data, path)


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise DecodeError(f"{path}: expected a list, got {type(data).__name__}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{path}[{index}]") for index, item in enumerate(data))
    if len(args) != len(data):
        raise DecodeError(f"{path}: expected {len(args)} items, got {len(data)}")
    return tuple(_decode(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _decode_dataclass(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise DecodeError(f"{path}: expected an object, got {type(data).__name__}")
    hints = _hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{path}.{field.name}: missing")
    return kind(**values)


def _decode_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind in (int, float, str, bool):
        if isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
            return data
        raise DecodeError(f"{path}: expected {kind.__name__}, got {type(data).__name__}")
    raise TypeError(f"{path}: the codec does not know {kind!r}")
