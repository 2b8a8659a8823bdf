"""Arrays by address: what compiled functions see of them, and when an entry is renewed."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numba import njit

from hetero_llm.spec_decode.array_table import ArrayTable, cube, matrix, vector


@njit
def _read(table: np.ndarray, place: int) -> tuple[int, int, float]:
    """Length and sum of the int32 vector at a place, and the sum of the matrix behind it."""
    values = vector(table, place, np.int32)
    return len(values), values.sum(), matrix(table, place + 1, np.float32).sum()


@njit
def _write(table: np.ndarray, place: int) -> tuple[int, int, int]:
    values = cube(table, place, np.int64)
    values[1, 2, 3] = 77
    return values.shape


def test_compiled_functions_see_the_arrays_themselves() -> None:
    bound = ArrayTable(4)
    values, weights = np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32)
    bound.put_all(1, (values, weights))
    assert _read(bound.table, 1) == (5, 10, 6.0)
    values[0], weights[1, 2] = 100, 4.0
    assert _read(bound.table, 1) == (5, 110, 9.0)
    deep = np.zeros((2, 3, 4), np.int64)
    bound.put(3, deep)
    assert _write(bound.table, 3) == (2, 3, 4) and deep[1, 2, 3] == 77


def test_a_cut_lasts_until_the_array_is_replaced() -> None:
    bound, weights = ArrayTable(2), np.zeros((0, 3), np.float32)
    bound.put(1, weights)
    values = np.arange(5, dtype=np.int32)
    bound.put(0, values)
    bound.cut(0, 2)
    bound.put(0, values)
    assert _read(bound.table, 0) == (2, 1, 0.0)
    bound.put(0, values.copy())
    assert _read(bound.table, 0) == (5, 10, 0.0)


def test_it_keeps_what_it_has_entered() -> None:
    """Nobody else has to: compiled functions never meet memory that was given back."""
    bound = ArrayTable(2)
    bound.put_all(0, (np.full(1 << 16, 3, np.int32), np.zeros((1, 1), np.float32)))
    gc.collect()
    others = [np.zeros(1 << 16, np.int32) for _ in range(4)]
    assert _read(bound.table, 0)[:2] == (1 << 16, 3 << 16) and len(others) == 4


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.int32)[:, 1],
        np.zeros((4, 4), np.int32).T,
        np.zeros((1, 1, 1, 1), np.int32),
        np.frombuffer(bytes(8), np.int32),
    ],
)
def test_an_array_that_compiled_code_would_misread_is_our_bug(array: Any) -> None:
    bound = ArrayTable(1)
    with pytest.raises(AssertionError):
        bound.put(0, array)
    assert not bound.table.any()
