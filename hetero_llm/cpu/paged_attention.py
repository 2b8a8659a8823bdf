"""Native attention of the torch path over the paged cache: wrapper of `csrc/paged_attention.cpp`.

Reference: `runner.attention.PlannedAttention` without a row kernel. Bench:
`bench/kernels/cpu_kernels.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.cpu import native
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.scored_attention import Scoring
from hetero_llm.utils.topology import read_topology

_MAX_HEAD_DIM = 256
_LANES = 16
_NO_WINDOW = 2**30  # more tokens than any sequence has; int32 sums with it do not overflow
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Work list of one step's decoded tokens, for one window.

    Attributes:
        tables: [B, columns] int32 K piece of layer 0 of each block.
        tasks: [K, 4] int64 token, KV head, first and last token of a part of its context.
        starts: [B * N + 1] int64 where the tasks of each (token, KV head) begin.
        partial: float32 scratch.
    """

    tables: np.ndarray
    tasks: np.ndarray
    starts: np.ndarray
    partial: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Tokens start .. start + count of one sequence, for one window.

    Attributes:
        table: [columns] int32 K piece of layer 0 of each block.
    """

    start: int
    count: int
    table: np.ndarray
    window: int


class NativeRowKernel:
    """Attends decoded tokens, one of a sequence, and, where the CPU has bf16 dot products and
    scores are only scaled, chunks of one sequence. A token's result depends on its own context
    only: neither on the batch nor on the number of threads.

    Attributes:
        supports_chunks: whether `plan_chunk` and `attend_chunk` may be called.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        cache: PagedKVCache,
        num_heads: int,
        scoring: Scoring,
        *,
        chunks: bool,
    ) -> None:
        self._library = library
        self._cache = cache
        self._num_heads = num_heads
        self.scoring = scoring
        self._slopes = None
        if scoring.slopes is not None:
            assert len(scoring.slopes) == num_heads
            self._slopes = np.array(scoring.slopes, np.float32)
        self._cut = int(library.hetero_attention_cut())
        self._partial = int(library.hetero_attention_partial(cache.shape.head_dim))
        self.supports_chunks = (
            chunks
            and scoring.is_plain
            and cache.shape.dtype == torch.bfloat16
            and bool(library.hetero_can_attend_chunk(cache.shape.head_dim))
        )

    def plan(self, contexts: np.ndarray, pieces: np.ndarray, window: int | None) -> RowPlan:
        """Prepares B decoded tokens, each the last one of its sequence.

        Args:
            contexts: [B] tokens each one sees, itself included, before any window.
            pieces: [B, columns] int64 index of the K piece of layer 0 of each block.
            window: sliding window in tokens.
        """
        shape = self._cache.shape
        contexts = contexts.astype(np.int64)
        first = np.zeros_like(contexts)
        if window is not None:
            first = np.maximum(contexts - window, 0)
        # Contexts are cut at multiples of `_cut`, where the library's own groups of tokens end.
        first_cut = first // self._cut
        per_head = np.repeat(-(-contexts // self._cut) - first_cut, shape.num_kv_heads)
        starts = np.zeros(len(per_head) + 1, np.int64)
        np.cumsum(per_head, out=starts[1:])
        pair = np.repeat(np.arange(len(per_head)), per_head)
        token = pair // shape.num_kv_heads
        begin = (first_cut[token] + np.arange(starts[-1]) - starts[pair]) * self._cut
        end = np.minimum(begin + self._cut, contexts[token])
        tasks = np.stack(
            (token, pair % shape.num_kv_heads, np.maximum(begin, first[token]), end), axis=1
        )
        group = self._num_heads // shape.num_kv_heads
        partial = torch.empty(len(tasks) * group * self._partial)
        return RowPlan(np.ascontiguousarray(pieces, np.int32), tasks, starts, partial)

    def attend(self, plan: RowPlan, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [B, heads, dim] (last dim contiguous) -> [B, heads, dim]; K and V are stored."""
        shape = self._cache.shape
        q, out = self._checked(q)
        self._library.hetero_attend_rows(
            q.data_ptr(),
            self._cache.data.data_ptr(),
            plan.tables.ctypes.data,
            out.data_ptr(),
            plan.tasks.ctypes.data,
            plan.starts.ctypes.data,
            len(plan.tasks),
            len(q),
            shape.num_kv_heads,
            self._num_heads // shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            plan.tables.shape[1],
            q.stride(0),
            2 * layer,
            self.scoring.scale,
            self.scoring.softcap or 0.0,
            None if self._slopes is None else self._slopes.ctypes.data,
            plan.partial.data_ptr(),
            int(shape.dtype == torch.bfloat16),
            torch.get_num_threads(),
        )
        return out

    def plan_chunk(
        self, start: int, count: int, pieces: np.ndarray, window: int | None
    ) -> ChunkPlan:
        """Prepares `count` tokens that follow `start` cached ones.

        Args:
            pieces: [columns] int64 index of the K piece of layer 0 of each block.
            window: sliding window in tokens.
        """
        table = np.ascontiguousarray(pieces, np.int32)
        return ChunkPlan(
            start, count, table, _NO_WINDOW if window is None else min(window, _NO_WINDOW)
        )

    def attend_chunk(self, plan: ChunkPlan, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [count, heads, dim] (last dim contiguous) -> the same shape; K and V are stored."""
        shape = self._cache.shape
        assert len(q) == plan.count
        q, out = self._checked(q)
        self._library.hetero_attend_chunk(
            q.data_ptr(),
            self._cache.data.data_ptr(),
            plan.table.ctypes.data,
            out.data_ptr(),
            plan.start,
            plan.count,
            shape.num_kv_heads,
            self._num_heads // shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            q.stride(0),
            2 * layer,
            plan.window,
            self.scoring.scale,
            torch.get_num_threads(),
        )
        return out

    def _checked(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q with its heads side by side, and room for the result."""
        shape = self._cache.shape
        assert q.dtype == shape.dtype and q.stride(2) == 1 and q.shape[1] == self._num_heads
        if q.stride(1) != shape.head_dim:
            q = q.contiguous()
        return q, torch.empty(q.shape, dtype=q.dtype)

    def store(self, layer: int, token_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k and v [T, kv_heads, dim] to the K rows `token_rows` [T] of layer 0, shifted."""
        shape = self._cache.shape
        k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (k, v))
        size = shape.dtype.itemsize
        self._library.hetero_store_kv(
            k.data_ptr(),
            v.data_ptr(),
            self._cache.data.data_ptr(),
            token_rows.data_ptr(),
            len(k),
            shape.num_kv_heads * shape.head_dim * size,
            k.stride(0) * size,
            v.stride(0) * size,
            2 * layer * shape.block_size,
            shape.block_size,
            torch.get_num_threads(),
        )


def native_row_kernel(
    cache: PagedKVCache,
    num_heads: int,
    scoring: float | Scoring,
    *,
    chunks: bool | None = None,
) -> NativeRowKernel | None:
    """The kernel for this cache; None where the library, the shape or sinks do not allow it.

    Args:
        scoring: how products become scores; a number is their scale alone.
        chunks: also attend chunks; None decides by the CPU. With AMX, torch's attention runs on
            tiles and is faster from about 30 tokens up (docs/history/log.md).
    """
    scoring = scoring if isinstance(scoring, Scoring) else Scoring(scoring)
    if scoring.sinks or not supports(cache.shape) or cache.data.device.type != "cpu":
        return None
    library = native.load()
    if library is None:
        return None
    if chunks is None:
        chunks = "amx_bf16" not in read_topology().isa
    return NativeRowKernel(library, cache, num_heads, scoring, chunks=chunks)


def supports(shape: KVCacheShape) -> bool:
    """bf16 and float32, head sizes that are multiples of 16 up to 256."""
    return (
        shape.dtype in _DTYPES and shape.head_dim % _LANES == 0 and shape.head_dim <= _MAX_HEAD_DIM
    )
