"""Random paged caches, attended with and without the native kernel, and in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.scored_attention import Scoring

LAYERS = 3
CONTEXTS = (1, 5, 255, 256, 257, 700, 1033)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    block_size: int
    softcap: float | None = None
    alibi: bool = False


def attend_both(
    case: AttentionCase,
    dtype: torch.dtype,
    starts: list[int] | None = None,
    counts: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Layer 1's output by torch and by the kernel, and whether both left the same cache."""
    reference, ours, _, same_cache = attend_all(case, dtype, starts, counts)
    return reference, ours, same_cache


def attend_all(
    case: AttentionCase,
    dtype: torch.dtype,
    starts: list[int] | None = None,
    counts: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """The same with layer 1's output in double precision as the third."""
    first = np.array([c - 1 for c in CONTEXTS] if starts is None else starts)
    count = np.array([1] * len(first) if counts is None else counts)
    size = case.block_size
    columns = -(-int((first + count).max()) // size)
    order = np.random.default_rng(0).permutation(len(first) * columns).astype(np.int32)
    tables = order.reshape(len(first), columns)
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
        attn_softcap=case.softcap,
        alibi_slopes=slopes_of(case),
        attn_sinks=False,
    )
    scoring = Scoring(config.attn_scale, config.attn_softcap, config.alibi_slopes)
    kernel = native_row_kernel(cache, case.heads, scoring, chunks=True)
    assert kernel is not None
    results = []
    for chosen in (None, kernel):
        cache.data.copy_(before)
        attention = TorchPagedAttention(config, cache, False, chosen)  # type: ignore[arg-type]
        planned = attention.plan(first, count, tables, positions, blocks)
        results.append((planned(1, q, k, v), cache.data.clone()))
    (reference, reference_cache), (ours, our_cache) = results
    tokens = our_cache[:, 1].transpose(0, 1)  # [K|V, block, token, kv_head, dim]
    exact = torch.cat(
        [
            _attend_exactly(q[owner == i], tokens[:, table].flatten(1, 2), case, int(first[i]))
            for i, table in enumerate(tables)
        ]
    )
    return reference, ours, exact, torch.equal(reference_cache, our_cache)


def slopes_of(case: AttentionCase) -> tuple[float, ...] | None:
    """Steeper and flatter ones."""
    return tuple(0.9 ** (i + 1) for i in range(case.heads)) if case.alibi else None


def _attend_exactly(
    q: torch.Tensor, keys_values: torch.Tensor, case: AttentionCase, start: int
) -> torch.Tensor:
    """Textbook attention of one sequence in float64: q [count, H, D], [2, tokens, N, D]."""
    group = case.heads // case.kv_heads
    k, v = keys_values.double().repeat_interleave(group, dim=2)
    last = start + torch.arange(len(q)).unsqueeze(1)
    keys = torch.arange(len(k))
    hidden = keys > last
    if case.window is not None:
        hidden |= keys <= last - case.window
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    slopes = slopes_of(case)
    if slopes is not None:
        scores = scores + torch.tensor(slopes, dtype=torch.float64).view(-1, 1, 1) * (keys - last)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
