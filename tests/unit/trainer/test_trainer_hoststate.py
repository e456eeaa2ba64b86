"""Host state: types come back as they were, what cannot be kept is named, and no code is ever run."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords.protocol import codec, snapshots
from lastwords.trainer import hoststate, randomness

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20),
    st.integers(-(1 << 200), 1 << 200),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()), st.just("$"))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.frozensets(st.one_of(st.integers(), st.text(), st.booleans()), max_size=4),
        st.sets(st.integers(), max_size=4),
    ),
    max_leaves=20,
)
HEAD = snapshots.RecordHead(step=3, attempt=2, rank=1, generation=1)


def round_trip(value: Any) -> Any:
    own, shared = hoststate.encode_part("own", value), hoststate.encode_part("shared", None)
    record = hoststate.parse_record(hoststate.build_record(HEAD, own, shared))
    assert record.head == HEAD
    return record.part("own")


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return np.float64(first).tobytes() == np.float64(second).tobytes() or (math.isnan(first) and math.isnan(second))
    if isinstance(first, dict):
        return list(map(repr, first)) == list(map(repr, second)) and all(
            same(a, b) for a, b in zip(first.values(), second.values(), strict=True)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert same(value, round_trip(value))


@pytest.mark.parametrize(
    "value",
    [
        collections.Counter("abca"), collections.deque([1, 2], maxlen=3), collections.defaultdict(list, {"a": [1]}),
        range(1, 9, 2), 1 + 2j, bytearray(b"x"), torch.Size([2, 3]), torch.float16, torch.device("cpu"), -0.0,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_come_back(value: Any) -> None:
    result = round_trip([value])[0]
    assert type(result) is type(value) and result == value and repr(result) == repr(value)


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "complex128", "float16", "<U3", "datetime64[s]", ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype=dtype)
    result = round_trip({"a": array})["a"]
    assert result.dtype == array.dtype and result.shape == shape and (result == array).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    result = round_trip((tensor, tensor.t() if tensor.dim() == 2 else tensor))
    assert result[0].dtype == dtype and result[0].shape == tensor.shape
    assert torch.equal(result[0].float(), tensor.float()) and result[1].shape == (tensor.t().shape if shape else ())


def test_numpy_scalars_come_back() -> None:
    for value in (np.float32(1.5), np.int8(-3), np.bool_(True), np.uint64(1 << 63)):
        result = round_trip([value])[0]
        assert type(result) is type(value) and result == value


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [lambda: 1, Colour.RED, object(), torch.nn.Linear(1, 1), torch.eye(2).to_sparse(), np.array([object()]),
     torch.zeros(1, dtype=torch.complex128), collections.defaultdict(lambda: 1)],
    ids=["function", "enum", "object", "module", "sparse", "object array", "complex128", "factory"],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(value: Any) -> None:
    with pytest.raises(hoststate.HostStateError, match=r"own\.deep\[1\]\.here"):
        hoststate.encode_part("own", {"deep": [0, {"here": value}]})


def test_o_45_an_unknown_tag_runs_nothing() -> None:
    with pytest.raises(codec.DecodeError, match="os.system"):
        hoststate.decode(json.loads('{"$": "os.system", "v": "true"}'), hoststate.Table())


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    state = round_trip(randomness.capture())

    def draw() -> tuple[Any, ...]:
        return random.gauss(0, 1), random.random(), float(np.random.randn()), torch.randn(5).tolist()

    first = draw()
    draw()
    randomness.restore(state)
    assert draw() == first


def test_a_torn_record_is_refused() -> None:
    data = hoststate.build_record(
        HEAD, hoststate.encode_part("own", {"t": torch.ones(100)}), hoststate.encode_part("shared", 1)
    )
    with pytest.raises(ValueError):
        hoststate.parse_record(data[:-8])
