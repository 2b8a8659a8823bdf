"""Compiled functions on draft trees in arrays, for the worker's tree pool and the engine's replica.

A tree is an int32 array [capacity, columns] with one row for each node, of which the first `count`
are in use. Rows are sorted by node id, and a parent has a lower id than its children, so it comes
before them. The first columns are those below. The root, the last token of the sequence, has no
row; -1 stands for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_llm.spec_decode.acceptance_stats import MEMORY
from hetero_llm.spec_decode.array_table import BORROWING
from hetero_llm.utils.jit import njit

ID, PARENT, TOKEN, BUCKET = range(4)
"""Columns of a node; PARENT is the row of its parent."""

BOOL, INT32, FLOAT32, FLOAT64 = (
    np.dtype(scalar) for scalar in (np.bool_, np.int32, np.float32, np.float64)
)
_ONE = np.float32(1.0)


def fit(values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values as a writable contiguous array of `dtype`: any other array type would make numba
    compile another version of each function it is passed to."""
    if type(values) is np.ndarray and values.dtype is dtype and values.flags.carray:
        return values
    return np.array(values, dtype)


@njit(**BORROWING)
def find_node(nodes: np.ndarray, count: int, wanted: int) -> int:
    """Row of the node with this id (binary search); -1 if there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if nodes[middle, ID] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < count and nodes[low, ID] == wanted else -1


@njit(**BORROWING)
def find_child(nodes: np.ndarray, count: int, parent: int, token: int) -> int:
    """Row of the last child of `parent` with this token; -1 if there is none."""
    found = -1
    for node in range(parent + 1, count):
        if nodes[node, PARENT] == parent and nodes[node, TOKEN] == token:
            found = node
    return found


@njit(**BORROWING)
def follow(
    nodes: np.ndarray, count: int, tokens: np.ndarray, begin: int, end: int, table: np.ndarray
) -> tuple[int, int]:
    """Walk down a tree along tokens[begin:end] and update the acceptance statistics.

    All children of every reached node count as tried, whether or not they were proposed.

    Args:
        table: [buckets, 2] float32 of a `BucketStats`; buckets beyond its length are skipped.

    Returns:
        The last node reached, -1 for the root, and the number of tokens that led there.
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
            bucket = nodes[other, BUCKET]
            if bucket >= len(table):
                continue
            if table[bucket, 1] >= MEMORY:
                table[bucket, 0] *= np.float32(0.5)
                table[bucket, 1] *= np.float32(0.5)
            table[bucket, 0] += _ONE if hit else np.float32(0.0)
            table[bucket, 1] += _ONE
        if followed < 0:
            return node, position - begin
        node = followed
    return node, end - begin


@njit(**BORROWING)
def renumber_subtree(nodes: np.ndarray, count: int, root: int, places: np.ndarray) -> int:
    """Number the nodes of the subtree below `root`, in order.

    Args:
        places: [count] int64, written: new row of each node; -1 outside the subtree.

    Returns:
        Number of nodes in the subtree.
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
def move_node(nodes: np.ndarray, node: int, root: int, places: np.ndarray, columns: int) -> None:
    """Move a node to its new row `places[node]` and translate its parent; a parent up to `root`
    becomes the root, -1. Call it in ascending order of nodes: new rows are not above old ones.

    Args:
        places: [count] int64 new row of each node.
        columns: number of columns, a constant for the compiler.
    """
    place, parent = places[node], nodes[node, PARENT]
    for column in range(columns):
        nodes[place, column] = nodes[node, column]
    nodes[place, PARENT] = places[parent] if parent > root else -1


@njit(**BORROWING)
def acceptance_rate(table: np.ndarray, bucket: int) -> float:
    """float32 rate of one bucket, as `acceptance_stats.rates_of` estimates it."""
    return (table[bucket, 0] + _ONE) / (table[bucket, 1] + np.float32(2.0))


@njit(**BORROWING)
def compute_path_probs(
    nodes: np.ndarray,
    count: int,
    table: np.ndarray,
    min_probs: np.ndarray,
    path_probs: np.ndarray,
    left: np.ndarray,
) -> None:
    """Compute the probability that the sequence goes through each node.

    A node's path probability is its parent's times its own conditional probability: the rate of its
    bucket, limited by what its earlier siblings leave of 1, but at least `min_probs`, where another
    proposer gave a higher probability.

    Args:
        table: [buckets, 2] float32 of a `BucketStats`.
        min_probs: [capacity] float32 lower bounds, each given the node's parent.
        path_probs: [capacity] float32, written. The root has probability 1.
        left: [capacity + 1] float32, written: conditional probability that each parent's children
            leave; entry 0 is the root's.
    """
    left[0] = _ONE
    for node in range(count):
        parent, bucket = nodes[node, PARENT], nodes[node, BUCKET]
        rate = max(min(acceptance_rate(table, bucket), left[parent + 1]), min_probs[node])
        left[parent + 1] = max(left[parent + 1] - rate, np.float32(0.0))
        left[node + 1] = _ONE
        path_probs[node] = rate * (path_probs[parent] if parent >= 0 else _ONE)


# -- the k most likely of many: keys of probability and number, in a min-heap -------------------


@njit(**BORROWING)
def key_of(path_prob: float, number: int) -> Any:
    """uint64 key that orders by probability, then by descending number.

    Args:
        path_prob: float32, not negative.
        number: 0 .. 2^32 - 1.
    """
    bits = np.uint64(np.float32(path_prob).view(np.uint32))
    return (bits << np.uint64(32)) | np.uint64(0xFFFFFFFF - number)


@njit(**BORROWING)
def number_of(key: Any) -> Any:
    return 0xFFFFFFFF - np.int64(key & np.uint64(0xFFFFFFFF))


@njit(**BORROWING)
def prob_of_key(key: Any) -> Any:
    return np.uint32(key >> np.uint64(32)).view(np.float32)


@njit(**BORROWING)
def push_largest(heap: np.ndarray, size: int, most: int, key: Any) -> int:
    """Insert a key into a min-heap that keeps the `most` largest keys. Returns its new size."""
    if size < most:
        place = size
        while place > 0 and heap[(place - 1) // 2] > key:
            heap[place] = heap[(place - 1) // 2]
            place = (place - 1) // 2
        heap[place] = key
        return size + 1
    if most > 0 and key > heap[0]:
        _replace_smallest(heap, size, key)
    return size


@njit(**BORROWING)
def sort_descending(heap: np.ndarray, size: int) -> None:
    """Turn the heap into an array in descending order."""
    for last in range(size - 1, 0, -1):
        key = heap[last]
        heap[last] = heap[0]
        _replace_smallest(heap, last, key)


@njit(**BORROWING)
def _replace_smallest(heap: np.ndarray, size: int, key: Any) -> None:
    """Replace the smallest key of the heap."""
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
