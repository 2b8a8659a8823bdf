"""Arrays by address: what compiled functions see of them, and when an entry is renewed."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit

from hetero_llm.spec_decode.array_table import (
    ArrayTable,
    Float32Matrix,
    Int32Matrix,
    Int32Vector,
    Int64Cube,
    reader_of,
)


class _Pair(NamedTuple):
    values: Int32Vector
    weights: Float32Matrix


class _Nested(NamedTuple):
    pair: _Pair
    matrix: Int32Matrix


class _Params(NamedTuple):
    size: int
    is_on: bool
    rate: float
    offset: int


class _Arrays:
    first: Int32Vector
    pair: _Pair
    params: _Params
    nested: _Nested
    cube: Int64Cube


_read = reader_of(_Arrays)


@njit
def _sums(table: np.ndarray) -> tuple[int, int, float]:
    """Length and sum of the pair's vector, and the sum of its matrix."""
    values, weights = _read(table, "pair")
    return len(values), values.sum(), weights.sum()


@njit
def _write(table: np.ndarray) -> tuple[int, int, int]:
    values = _read(table, "cube")
    values[1, 2, 3] = 77
    return values.shape


@njit
def _others(table: np.ndarray) -> tuple[int, bool, float, int, int, int]:
    params, nested = _read(table, "params"), _read(table, "nested")
    return (
        params.size, params.is_on, params.rate, params.offset, nested.pair.values.sum(),
        nested.matrix[1, 2],
    )  # fmt: skip


def test_compiled_functions_see_the_arrays_themselves() -> None:
    arrays = ArrayTable(_Arrays)
    values, weights = np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32)
    arrays.put("pair", _Pair(values, weights))
    assert _sums(arrays.table) == (5, 10, 6.0)
    values[0], weights[1, 2] = 100, 4.0
    assert _sums(arrays.table) == (5, 110, 9.0)
    deep = np.zeros((2, 3, 4), np.int64)
    arrays.put("cube", deep)
    assert _write(arrays.table) == (2, 3, 4) and deep[1, 2, 3] == 77


def test_numbers_and_nested_arrays() -> None:
    arrays = ArrayTable(_Arrays)
    arrays.put("params", _Params(3, True, 0.25, -9))
    arrays.put("nested.pair", _Pair(np.full(4, 5, np.int32), np.zeros((1, 1), np.float32)))
    arrays.put("nested.matrix", np.arange(6, dtype=np.int32).reshape(2, 3))
    assert _others(arrays.table) == (3, True, 0.25, -9, 20, 5)


def test_a_cut_lasts_until_the_array_is_replaced() -> None:
    arrays, weights = ArrayTable(_Arrays), np.zeros((0, 3), np.float32)
    arrays.put("pair.weights", weights)
    values = np.arange(5, dtype=np.int32)
    arrays.put("pair.values", values)
    arrays.cut("pair.values", 2)
    arrays.put("pair.values", values)
    assert _sums(arrays.table) == (2, 1, 0.0)
    arrays.put("pair.values", values.copy())
    assert _sums(arrays.table) == (5, 10, 0.0)


def test_it_keeps_what_it_has_entered() -> None:
    """Nobody else has to: compiled functions never meet memory that was given back."""
    arrays = ArrayTable(_Arrays)
    arrays.put("pair", _Pair(np.full(1 << 16, 3, np.int32), np.zeros((1, 1), np.float32)))
    gc.collect()
    others = [np.zeros(1 << 16, np.int32) for _ in range(4)]
    assert _sums(arrays.table)[:2] == (1 << 16, 3 << 16) and len(others) == 4


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.int32)[:, 1],
        np.zeros((4, 4), np.int32).T,
        np.zeros((1, 1, 1, 1), np.int32),
        np.frombuffer(bytes(8), np.int32),
        np.zeros(4, np.int64),
    ],
)
def test_an_array_that_compiled_code_would_misread_is_our_bug(array: Any) -> None:
    arrays = ArrayTable(_Arrays)
    with pytest.raises(AssertionError):
        arrays.put("first", array)
    assert not arrays.table.any()


_MODULE = """
import numpy as np
from numba import njit
from hetero_llm.spec_decode.array_table import ArrayTable, Int32Vector, reader_of

class Arrays:
    tokens: Int32Vector

read = reader_of(Arrays)

@njit(cache=True, nogil=True)
def total(table):
    return read(table, "tokens").sum()

arrays = ArrayTable(Arrays)
arrays.put("tokens", np.arange(5, dtype=np.int32))
assert total(arrays.table) == 10
print(sum(total.stats.cache_hits.values()))
"""


def test_functions_that_read_a_table_are_cached_on_disk(tmp_path: Path) -> None:
    (tmp_path / "reads_a_table.py").write_text(_MODULE)
    hits = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
             "import reads_a_table"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert hits == ["0", "1"]
