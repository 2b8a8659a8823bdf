"""Attention of one step's rows (csrc/step/attention.h) for tests and benches.

The executor calls the C++ functions itself; this is the checked way to them from Python, with the
twin in torch. Everything lies in CPU memory.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_MAX_DIM, _MAX_GROUP, _MAX_TREE = 256, 16, 64
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class StepRows:
    """Who attends what; sequences' rows follow each other.

    Attributes:
        slots: [sequences] int32 row of `tables`.
        starts, counts: [sequences] int32 tokens in the cache before the step, rows in it.
        bases: [sequences] int32 of a tree: the first token that not all its rows see, at most
            its start.
        is_tree: [sequences] uint8.
        ancestors: [rows] uint64, of tree rows bit i says whether token base + i is seen: those of
            their ancestors, which lie before them, and their own.
        tables: [slots, columns] int32 block ids.
    """

    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    bases: NDArray[np.int32]
    is_tree: NDArray[np.uint8]
    ancestors: NDArray[np.uint64]
    tables: NDArray[np.int32]

    @property
    def rows(self) -> int:
        return int(self.counts.sum())


class StepAttention:
    """A plan and the team of Python threads that carries it out."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        assert threads > 0
        self._library = library
        self._threads = threads
        library.hetero_attention_new.restype = ctypes.c_void_p
        library.hetero_attention_needs_merge.restype = ctypes.c_int64
        self._plan = ctypes.c_void_p(library.hetero_attention_new(ctypes.c_int64(threads)))
        self._rows: StepRows | None = None

    def close(self) -> None:
        """Frees the plan; nothing may be called afterwards."""
        self._library.hetero_attention_free(self._plan)

    def plan(
        self,
        cache: torch.Tensor,
        rows: StepRows,
        *,
        heads: int,
        window: int,
        scale: float,
        isa: int,
    ) -> bool:
        """Prepares a step; true if cut contexts have to be joined.

        Args:
            cache: [blocks, layers, 2, block size, kv heads, dim] bf16 or float32, contiguous.
            window: tokens that a row sees, itself included; 0 for all.
        """
        _, layers, pair, block_size, kv_heads, dim = cache.shape
        assert cache.dtype in _DTYPES and cache.is_contiguous() and pair == 2
        assert dim % 8 == 0 and 8 <= dim <= _MAX_DIM
        assert heads % kv_heads == 0 and heads // kv_heads <= _MAX_GROUP and window >= 0
        count = len(rows.slots)
        for array, dtype, size in (
            (rows.slots, np.int32, count),
            (rows.starts, np.int32, count),
            (rows.counts, np.int32, count),
            (rows.bases, np.int32, count),
            (rows.is_tree, np.uint8, count),
            (rows.ancestors, np.uint64, rows.rows),
        ):
            assert array.dtype == dtype and array.shape == (size,) and array.flags.c_contiguous
        assert rows.tables.dtype == np.int32 and rows.tables.flags.c_contiguous
        trees, ends = rows.is_tree != 0, rows.starts + rows.counts
        assert int(ends.max()) <= rows.tables.shape[1] * block_size
        assert (rows.counts > 0).all() and (rows.bases[trees] <= rows.starts[trees]).all()
        assert ((ends - rows.bases)[trees] <= _MAX_TREE).all()
        is_bf16 = cache.dtype == torch.bfloat16
        sizes = np.array(
            [is_bf16, layers, block_size, kv_heads, dim, count, rows.rows]
            + [rows.tables.shape[1], heads, window, isa],
            np.int64,
        )
        self._rows = rows  # the plan points into its arrays
        self._cache, self._width = cache, heads * dim
        self._library.hetero_attention_plan(
            self._plan,
            ctypes.c_void_p(cache.data_ptr()),
            *(
                ctypes.c_void_p(array.ctypes.data)
                for array in (sizes, rows.slots, rows.starts, rows.counts, rows.bases, rows.is_tree)
            ),
            ctypes.c_void_p(rows.ancestors.ctypes.data),
            ctypes.c_void_p(rows.tables.ctypes.data),
            ctypes.byref(ctypes.c_float(scale)),
        )
        return bool(self._library.hetero_attention_needs_merge(self._plan))

    def __call__(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attends one layer.

        Args:
            q: [rows, heads * dim] of the cache's dtype; rows may be apart.
            out: [rows, heads * dim] float32; rows may be apart.
        """
        assert self._rows is not None and 0 <= layer < self._cache.shape[1]
        assert q.shape == out.shape == (self._rows.rows, self._width)
        assert q.dtype == self._cache.dtype and out.dtype == torch.float32
        assert q.stride(1) == out.stride(1) == 1
        self._library.hetero_attention_begin_layer(self._plan)
        joins = bool(self._library.hetero_attention_needs_merge(self._plan))
        barrier = threading.Barrier(self._threads)

        def part(thread: int) -> None:
            target = (ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.stride(0)))
            self._library.hetero_attention_attend(
                self._plan,
                ctypes.c_int64(layer),
                ctypes.c_void_p(q.data_ptr()),
                ctypes.c_int64(q.stride(0)),
                *target,
                ctypes.c_int64(thread),
            )
            if joins:
                barrier.wait()
                self._library.hetero_attention_merge(self._plan, *target, ctypes.c_int64(thread))

        others = [threading.Thread(target=part, args=(i,)) for i in range(1, self._threads)]
        for other in others:
            other.start()
        part(0)
        for other in others:
            other.join()


def ref_attention(
    cache: torch.Tensor,
    rows: StepRows,
    q: torch.Tensor,
    *,
    layer: int,
    heads: int,
    window: int,
    scale: float,
) -> torch.Tensor:
    """The same in float64, [rows, heads * dim]; arguments as in `StepAttention`."""
    block_size, kv_heads, dim = cache.shape[3:]
    outputs, first = [], 0
    for s, slot in enumerate(rows.slots):
        start, count = int(rows.starts[s]), int(rows.counts[s])
        table = torch.from_numpy(rows.tables[slot][: -(-(start + count) // block_size)]).long()
        tokens = cache[table, layer].transpose(0, 1).flatten(1, 2)[:, : start + count].double()
        k, v = tokens.repeat_interleave(heads // kv_heads, dim=2)
        mine = q[first : first + count].double().view(count, heads, dim)
        seen = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        if rows.is_tree[s]:
            bits, base = rows.ancestors[first : first + count], int(rows.bases[s])
            columns = np.arange(start + count - base, dtype=np.uint64)
            seen[:, base:] = torch.from_numpy((bits[:, None] >> columns & np.uint64(1)) != 0)
        if window:  # the last ones of those that would be seen
            order = seen.cumsum(1)
            seen &= order > order[:, -1:] - window
        scores = torch.einsum("qhd,khd->hqk", mine, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        first += count
    return torch.cat(outputs)
