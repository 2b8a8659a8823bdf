"""Trees in rows of arrays: what the worker's forest and the engine's mirror of it have in common.

A tree is [capacity, columns] int32, a node a row, of which the first `count` are in use: ids
ascend, so parents come before their children, and the columns below are the first ones. The root,
the last token of a text, is no row: -1 stands for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.spec_decode.acceptance_stats import MEMORY
from hetero_llm.spec_decode.array_table import BORROWING

ID, PARENT, TOKEN, KIND = range(4)
"""Columns of a node; PARENT is its row."""

BOOL, INT32, FLOAT32, FLOAT64 = (
    np.dtype(kind) for kind in (np.bool_, np.int32, np.float32, np.float64)
)
_ONE = np.float32(1.0)


def fit(values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array as compiled code knows it: any other type, also a read-only one, would compile every
    function once more."""
    if type(values) is np.ndarray and values.dtype is dtype and values.flags.carray:
        return values
    return np.array(values, dtype)


@njit(**BORROWING)
def find(nodes: np.ndarray, count: int, wanted: int) -> int:
    """Row of the node with this id, -1 if there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if nodes[middle, ID] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < count and nodes[low, ID] == wanted else -1


@njit(**BORROWING)
def child(nodes: np.ndarray, count: int, parent: int, token: int) -> int:
    """Row of a node's child, the last one with this token; -1 if there is none."""
    found = -1
    for node in range(parent + 1, count):
        if nodes[node, PARENT] == parent and nodes[node, TOKEN] == token:
            found = node
    return found


@njit(**BORROWING)
def follow(
    nodes: np.ndarray, count: int, tokens: np.ndarray, begin: int, end: int, table: np.ndarray
) -> tuple[int, int]:
    """Walks down a tree along tokens begin .. end-1, and enters into `table` what came of it.

    Children of every node that was reached count, whether or not they were drafts.

    Args:
        table: [kinds, 2] float32, see `Record`; kinds beyond it are left out.

    Returns:
        the last node reached, -1 for the root, and how many tokens led there.
    """
    node = -1
    for position in range(begin, end):
        token = tokens[position]
        followed = -1
        for other in range(node + 1, count):
            if nodes[other, PARENT] != node:
                continue
            hit = nodes[other, TOKEN] == token
            if hit:
                followed = other
            kind = nodes[other, KIND]
            if kind >= len(table):
                continue
            if table[kind, 1] >= MEMORY:
                table[kind, 0] *= np.float32(0.5)
                table[kind, 1] *= np.float32(0.5)
            table[kind, 0] += _ONE if hit else np.float32(0.0)
            table[kind, 1] += _ONE
        if followed < 0:
            return node, position - begin
        node = followed
    return node, end - begin


@njit(**BORROWING)
def below(nodes: np.ndarray, count: int, root: int, places: np.ndarray) -> int:
    """Numbers what is left of a tree when `root` becomes its root.

    Args:
        places: [count] int32, written: row of each node then, -1 for those that are left out.

    Returns:
        how many are left.
    """
    kept = 0
    for node in range(count):
        parent = nodes[node, PARENT]
        places[node] = -1
        if node > root and (parent == root or (parent > root and places[parent] >= 0)):
            places[node] = kept
            kept += 1
    return kept


@njit(**BORROWING)
def chances_of(
    nodes: np.ndarray,
    count: int,
    table: np.ndarray,
    given: np.ndarray,
    chances: np.ndarray,
    left: np.ndarray,
) -> None:
    """Chances that a text goes through the nodes.

    A node is as likely as its parent times the rate of its kind, and siblings together are no
    likelier than their parent, the first ones come first. A node is no less likely than `given`,
    whatever its siblings are: somebody knows more about it.

    Args:
        table: see `Record`.
        given, chances: [capacity] float32; `chances` is written, that of the root is 1.
        left: [capacity + 1] float32, written: of each parent's chance, the part that its children
            have not taken; the root's comes first.
    """
    left[0] = _ONE
    for node in range(count):
        parent, kind = nodes[node, PARENT], nodes[node, KIND]
        rate = (table[kind, 0] + _ONE) / (table[kind, 1] + np.float32(2.0))
        rate = max(min(rate, left[parent + 1]), given[node])
        left[parent + 1] = max(left[parent + 1] - rate, np.float32(0.0))
        left[node + 1] = _ONE
        chances[node] = rate * (chances[parent] if parent >= 0 else _ONE)


# -- the likeliest of many: keys of chance and number, in a heap with the least at the top ------


@njit(**BORROWING)
def key_of(chance: float, number: int) -> Any:
    """A key that is larger for a larger chance, or for a lower number at the same chance.

    Args:
        chance: float32, not negative. number: 0 .. 2^32 - 1.
    """
    bits = np.uint64(np.float32(chance).view(np.uint32))
    return (bits << np.uint64(32)) | np.uint64(0xFFFFFFFF - number)


@njit(**BORROWING)
def number_of(key: Any) -> Any:
    return 0xFFFFFFFF - np.int64(key & np.uint64(0xFFFFFFFF))


@njit(**BORROWING)
def chance_of(key: Any) -> Any:
    return np.uint32(key >> np.uint64(32)).view(np.float32)


@njit(**BORROWING)
def offer(heap: np.ndarray, size: int, most: int, key: Any) -> int:
    """Puts a key into a heap of the `most` largest. Returns its new size."""
    if size < most:
        place = size
        while place > 0 and heap[(place - 1) // 2] > key:
            heap[place] = heap[(place - 1) // 2]
            place = (place - 1) // 2
        heap[place] = key
        return size + 1
    if most > 0 and key > heap[0]:
        _sink(heap, size, key)
    return size


@njit(**BORROWING)
def sort_down(heap: np.ndarray, size: int) -> None:
    """A heap becomes an array, the largest key first."""
    for last in range(size - 1, 0, -1):
        key = heap[last]
        heap[last] = heap[0]
        _sink(heap, last, key)


@njit(**BORROWING)
def _sink(heap: np.ndarray, size: int, key: Any) -> None:
    """Replaces the least key."""
    place = 0
    while True:
        lower = 2 * place + 1
        if lower >= size:
            break
        if lower + 1 < size and heap[lower + 1] < heap[lower]:
            lower += 1
        if heap[lower] >= key:
            break
        heap[place] = heap[lower]
        place = lower
    heap[place] = key
