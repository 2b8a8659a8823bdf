"""Random paged caches, attended with and without the native kernel."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

LAYERS = 3
CONTEXTS = (1, 5, 255, 256, 257, 700, 1033)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    block_size: int


def attend_both(
    case: AttentionCase,
    dtype: torch.dtype,
    starts: list[int] | None = None,
    counts: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Layer 1's output by torch and by the kernel, and whether both left the same cache."""
    first = np.array([c - 1 for c in CONTEXTS] if starts is None else starts)
    count = np.array([1] * len(first) if counts is None else counts)
    size = case.block_size
    columns = -(-int((first + count).max()) // size)
    tables = np.arange(len(first) * columns, dtype=np.int32)
    np.random.default_rng(0).shuffle(tables)
    tables = tables.reshape(len(first), columns)
    shape = KVCacheShape(LAYERS, case.kv_heads, case.dim, size, dtype)
    cache = PagedKVCache(shape, tables.size, torch.device("cpu"))
    cache.data.normal_()
    before = cache.data.clone()
    total = int(count.sum())
    # Views of a fused projection, as the models pass them.
    fused = torch.randn(total, case.heads + 2 * case.kv_heads, case.dim, dtype=dtype)
    q, k, v = fused.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    owner = np.repeat(np.arange(len(first)), count)
    positions = np.arange(total) - np.repeat(np.cumsum(count) - count - first, count)
    blocks = tables[owner, positions // size]
    config = SimpleNamespace(
        sliding_windows=(case.window,) * LAYERS,
        num_kv_heads=case.kv_heads,
        attn_scale=case.dim**-0.5,
    )
    kernel = native_row_kernel(cache, case.heads, config.attn_scale)
    assert kernel is not None
    results = []
    for chosen in (None, kernel):
        cache.data.copy_(before)
        attention = TorchPagedAttention(config, cache, False, chosen)  # type: ignore[arg-type]
        planned = attention.plan(first, count, tables, positions, blocks)
        results.append((planned(1, q, k, v), cache.data.clone()))
    (twin, twin_cache), (ours, our_cache) = results
    return twin, ours, torch.equal(twin_cache, our_cache)
