"""Arrays that compiled functions find by themselves.

A compiled function takes a third of a microsecond for every array that it is handed, and several
times as long with the cold caches behind a step of the device; a proposal needs seventy. So arrays
that stay are entered into a table of addresses, and the table is all that is handed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

BORROWING: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
"""Options of `njit` for functions that allocate nothing: arrays belong to the caller, and their
references are not counted. Counting took four fifths of a lookup's time, and threads contend for
the counters."""


class ArrayTable:
    """Holds arrays, at numbered places, for compiled functions. One thread writes, and nobody reads
    meanwhile.

    Attributes:
        table: [places, 4] int64 for compiled functions: address and sizes of each array. Good as
            long as this object lives.
    """

    def __init__(self, places: int) -> None:
        self.table = np.zeros((places, 4), np.int64)
        self._held: list[Any] = [None] * places

    def put(self, place: int, array: NDArray[Any]) -> None:
        """Enters an array of one to three dimensions. It costs next to nothing if it is there."""
        if self._held[place] is not array:
            self._enter(place, array)
            self._held[place] = array

    def put_all(self, place: int, arrays: tuple[NDArray[Any], ...]) -> None:
        """Enters arrays at this place and those that follow. It costs next to nothing if they came
        in this very tuple."""
        if self._held[place] is not arrays:
            for offset, array in enumerate(arrays):
                self._enter(place + offset, array)
            self._held[place] = arrays

    def cut(self, place: int, rows: int) -> None:
        """From now on the array there has only its first rows."""
        self.table[place, 1] = rows

    def _enter(self, place: int, array: NDArray[Any]) -> None:
        assert array.flags.carray and 1 <= array.ndim <= 3
        self.table[place, : array.ndim + 1] = array.ctypes.data, *array.shape


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as `carray` takes it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit(cache=True, nogil=True)
def vector(table: np.ndarray, place: int, dtype: Any) -> Any:
    """The array of one dimension at this place, whose type the caller knows."""
    return carray(_pointer(table[place, 0]), (table[place, 1],), dtype)


@njit(cache=True, nogil=True)
def matrix(table: np.ndarray, place: int, dtype: Any) -> Any:
    """The array of two dimensions at this place, whose type the caller knows."""
    return carray(_pointer(table[place, 0]), (table[place, 1], table[place, 2]), dtype)


@njit(cache=True, nogil=True)
def cube(table: np.ndarray, place: int, dtype: Any) -> Any:
    """The array of three dimensions at this place, whose type the caller knows."""
    sizes = (table[place, 1], table[place, 2], table[place, 3])
    return carray(_pointer(table[place, 0]), sizes, dtype)
