"""Values as bytes and back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, LoadConfig
from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.distributed.value_codec import ValueCodec, types_within


class Color(Enum):
    RED = "r"
    BLUE = object()


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    color: Color | None = None

    def __post_init__(self) -> None:
        assert self.x != 13


@dataclass
class Line:
    points: tuple[Point, ...]


FORM = ValueCodec(Point, Line, Color)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.text(st.characters(categories=["Cs"])) | st.binary() | st.sampled_from(Color)
    | st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: array("i", ids))
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
POINTS = st.builds(Point, st.integers(14), st.none() | st.sampled_from(Color))


@given(VALUES | POINTS | st.builds(Line, st.lists(POINTS, max_size=3).map(tuple)))
def test_round_trip(value: Any) -> None:
    read = FORM.read(FORM.write(value))
    assert read == value and type(read) is type(value)


def test_dataclasses_are_not_checked_again() -> None:
    point = Point(1)
    object.__setattr__(point, "x", 13)
    assert FORM.read(FORM.write(point)).x == 13


@pytest.mark.parametrize("value", [{1}, object(), lambda: 0, array("d", [1.0]), 1j, [Point]])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has no plain form"):
        FORM.write(value)


@pytest.mark.parametrize("data", [b"x\0\0\0\0", b"s\4\0\0\0a", b"NN"])
def test_damaged_bytes(data: bytes) -> None:
    with pytest.raises((ValueError, AssertionError)):
        FORM.read(data)


def test_types_within_a_dataclass() -> None:
    assert set(types_within(Line)) == {Line, Point, Color}
    found = types_within(EngineConfig)
    assert found == types_within(EngineConfig)
    assert {EngineConfig, LoadConfig, TypicalAcceptance} <= set(found)


def test_a_configuration() -> None:
    given = {"model": "m", "rope_scaling": {"factor": 2.0}, "hf_overrides": {"a": [1, None]}}
    config = EngineConfig.from_args(resolve_engine_args({**given, "use_lookahead": True}))
    form = ValueCodec(*types_within(EngineConfig))
    assert form.read(form.write(config)) == config


@given(arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)))
def test_arrays(value: np.ndarray) -> None:
    if value.dtype.kind not in "biuf":
        with pytest.raises(TypeError, match="^an array of .* has no plain form$"):
            FORM.write(value)
        return
    read = FORM.read(FORM.write({"a": value}))["a"]
    np.testing.assert_array_equal(read, value, strict=True)
    assert read.dtype == value.dtype


def test_an_array_whose_rows_do_not_follow_each_other() -> None:
    value = np.arange(12).reshape(3, 4).T
    np.testing.assert_array_equal(FORM.read(FORM.write(value)), value, strict=True)
