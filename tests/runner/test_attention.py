"""Paged attention in torch against a plain softmax over each row's context, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 2, 6, 2, 16, 8
STARTS, COUNTS = [0, 30, 7, 19, 64], [11, 1, 9, 1, 24]


def filled_cache() -> tuple[PagedKVCache, np.ndarray]:
    """A cache of random K and V, and shuffled block tables with NaN in every unused block."""
    columns = 12
    order = np.random.default_rng(0).permutation(80).astype(np.int32)
    tables = order[: len(STARTS) * columns].reshape(len(STARTS), columns)
    shape = KVCacheShape(LAYERS, KV_HEADS, DIM, BLOCK, torch.float32)
    cache = PagedKVCache(shape, 80, torch.device("cpu"))
    cache.data.normal_()
    cache.data[torch.from_numpy(order[tables.size :].astype(np.int64))] = float("nan")
    return cache, tables


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("row_by_row", [False, True])
def test_equals_softmax_over_the_context(window: int | None, row_by_row: bool) -> None:
    torch.manual_seed(0)
    cache, tables = filled_cache()
    starts, counts = np.array(STARTS), np.array(COUNTS)
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - starts, counts)
    blocks = tables[owner, positions // BLOCK]
    config = SimpleNamespace(sliding_windows=(None, window), num_kv_heads=KV_HEADS, attn_scale=0.3)
    attention = TorchPagedAttention(config, cache, row_by_row)  # type: ignore[arg-type]
    q = torch.randn(len(owner), HEADS, DIM)
    k, v = torch.randn(2, len(owner), KV_HEADS, DIM)
    out = attention.plan(starts, counts, tables, positions, blocks)(1, q, k, v)
    for row, (sequence, position) in enumerate(zip(owner, positions, strict=True)):
        ids = torch.from_numpy(tables[sequence].astype(np.int64))
        context = cache.data[ids, 1].double()  # [columns, 2, BLOCK, kv_heads, dim]
        keys, values = (context[:, i].flatten(0, 1)[: position + 1] for i in (0, 1))
        low = 0 if window is None else max(0, position + 1 - window)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = keys[low:, group] @ q[row, head].double() * 0.3
            expected = scores.softmax(0) @ values[low:, group]
            torch.testing.assert_close(out[row, head].double(), expected, rtol=1e-5, atol=1e-5)
        at = position // BLOCK, position % BLOCK
        stored = cache.data[tables[sequence, at[0]], 1, :, at[1]]
        assert torch.equal(stored, torch.stack((k[row], v[row])))


def test_block_copies_are_whole_and_in_order() -> None:
    cache, _ = filled_cache()
    cache.data.copy_(torch.arange(80.0).view(80, 1, 1, 1, 1, 1).expand_as(cache.data))
    cache.copy_blocks([(3, 5), (5, 7)])
    assert cache.data[5].unique().tolist() == cache.data[7].unique().tolist() == [3.0]
