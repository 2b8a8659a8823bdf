"""Paged attention in torch against a plain softmax over each row's context, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.scored_attention import Reach, ScoredAttention, Scoring
from hetero_llm.spec_decode.verify import TreeTokens, tree_tokens

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 2, 6, 2, 16, 8
STARTS, COUNTS = [0, 30, 7, 19, 64], [11, 1, 9, 1, 24]


SINKS = torch.tensor([0.5, -1.0, 2.0, 7.0, -30.0, 0.0])


def config_of(
    *windows: int | None, softcap: float | None = None, alibi: bool = False, sinks: bool = False
) -> Any:
    slopes = tuple(0.5 ** (i + 1) for i in range(HEADS))
    return SimpleNamespace(
        sliding_windows=windows,
        num_kv_heads=KV_HEADS,
        attn_scale=0.3,
        attn_softcap=softcap,
        alibi_slopes=slopes if alibi else None,
        attn_sinks=sinks,
    )


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


def attended(
    config: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, distance: list[int]
) -> torch.Tensor:
    """One row in float64: q [H, D], keys and values [seen, N, D], and where the keys are, counted
    from the row."""
    group = len(q) // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("hd,khd->hk", q.double(), keys) * config.attn_scale
    if config.attn_softcap is not None:
        scores = config.attn_softcap * (scores / config.attn_softcap).tanh()
    if config.alibi_slopes is not None:
        slopes = torch.tensor(config.alibi_slopes, dtype=torch.float64)
        scores = scores + slopes[:, None] * torch.tensor(distance)
    if config.attn_sinks:
        scores = torch.cat((scores, SINKS.double()[:, None]), -1)
    return torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(values)], values)


SCORINGS = [
    (None, None, False, False), (5, None, False, False), (100, None, False, False),
    (5, 0.7, False, False), (None, None, True, False), (100, 0.7, True, False),
    (None, None, False, True), (5, 0.7, True, True),
]  # fmt: skip
SCORED = pytest.mark.parametrize(("window", "softcap", "alibi", "sinks"), SCORINGS)


@pytest.mark.parametrize("row_by_row", [False, True])
@SCORED
def test_equals_softmax_over_the_context(
    window: int | None, row_by_row: bool, softcap: float | None, alibi: bool, sinks: bool
) -> None:
    torch.manual_seed(0)
    cache, tables = filled_cache()
    starts, counts = np.array(STARTS), np.array(COUNTS)
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - starts, counts)
    blocks = tables[owner, positions // BLOCK]
    config = config_of(None, window, softcap=softcap, alibi=alibi, sinks=sinks)
    attention = TorchPagedAttention(config, cache, row_by_row)
    q = 3 * torch.randn(len(owner), HEADS, DIM)
    k, v = torch.randn(2, len(owner), KV_HEADS, DIM)
    own = SINKS if sinks else None
    out = attention.plan(starts, counts, tables, positions, blocks)(1, q, k, v, sinks=own)
    for row, (sequence, position) in enumerate(zip(owner, positions, strict=True)):
        ids = torch.from_numpy(tables[sequence].astype(np.int64))
        context = cache.data[ids, 1].double()  # [columns, 2, BLOCK, kv_heads, dim]
        low = 0 if window is None else max(0, position + 1 - window)
        keys, values = (context[:, i].flatten(0, 1)[low : position + 1] for i in (0, 1))
        distance = [place - int(position) for place in range(low, position + 1)]
        expected = attended(config, q[row], keys, values, distance)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)
        at = position // BLOCK, position % BLOCK
        stored = cache.data[tables[sequence, at[0]], 1, :, at[1]]
        assert torch.equal(stored, torch.stack((k[row], v[row])))


def drafted(starts: list[int], chunks: list[int], nodes: list[list[int]]) -> TreeTokens:
    """Tokens of a step: of each sequence `chunks[i]` plain ones, then nodes with these parents."""
    numbers = [starts, [c + len(n) for c, n in zip(chunks, nodes)], [1] * sum(chunks)]
    counts = [len(n) for n in nodes]
    drafts = DraftBatch(*(np.array(a, np.int32) for a in (counts, sum(nodes, []), sum(nodes, []))))
    step = SchedulerOutput(
        np.arange(len(starts)),
        *(np.array(n, np.int32) for n in (*numbers, [1] * len(starts))),
        (),
        (),
        np.zeros((3, 0), np.int32),
        np.zeros((2, 0), np.int32),
        drafts,
    )
    return tree_tokens(step, drafts)


@pytest.mark.parametrize("kind", ["masks", "row by row", "row kernel"])
@SCORED
def test_nodes_see_their_own_path(
    window: int | None, kind: str, softcap: float | None, alibi: bool, sinks: bool
) -> None:
    """Trees beside a chunk and single rows; one tree's root is the first token of all."""
    torch.manual_seed(0)
    cache, tables = filled_cache()
    starts, chunks = np.array([4, 14, 19, 0, 20]), np.array([5, 1, 1, 1, 1])
    nodes = [[], [-1, -1, 0, 1, 1, 4], [], [-1, 0, 1], []]
    counts = chunks + [len(n) for n in nodes]
    trees = drafted(starts.tolist(), chunks.tolist(), nodes)
    owner = np.repeat(np.arange(5), counts)
    blocks = tables[owner, trees.kv_indices // BLOCK]
    config = config_of(None, window, softcap=softcap, alibi=alibi, sinks=sinks)
    kernel = native_row_kernel(cache, HEADS, Scoring.of(config)) if kind == "row kernel" else None
    attention = TorchPagedAttention(config, cache, kind == "row by row", kernel)
    q = torch.randn(len(owner), HEADS, DIM)
    k, v = torch.randn(2, len(owner), KV_HEADS, DIM)
    attend = attention.plan(starts, counts, tables, trees.kv_indices, blocks, trees)
    out = attend(1, q, k, v, sinks=SINKS if sinks else None)
    for row, sequence in enumerate(owner):
        path = [row - int(counts[:sequence].sum())]
        while path[0]:
            above = nodes[sequence]
            path.insert(0, above[path[0] - 1] + 1 if above else path[0] - 1)
        start = int(starts[sequence])
        assert trees.positions[row] == start + len(path) - 1
        seen = [*range(start), *(start + p for p in path)][-(window or 0) :]
        context = cache.data[torch.from_numpy(tables[sequence].astype(np.int64)), 1].double()
        keys, values = (context[:, i].flatten(0, 1)[seen] for i in (0, 1))
        distance = [place - len(seen) + 1 for place in range(len(seen))]
        expected = attended(config, q[row], keys, values, distance)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


@SCORED
def test_row_by_row_a_node_gets_the_bits_of_a_plain_row(
    window: int | None, softcap: float | None, alibi: bool, sinks: bool
) -> None:
    """Three rows as a chunk, and as the second path of a tree."""
    torch.manual_seed(0)
    config = config_of(window, softcap=softcap, alibi=alibi, sinks=sinks)
    cache, tables = filled_cache()
    q = torch.randn(3, HEADS, DIM)
    k, v = torch.randn(2, 3, KV_HEADS, DIM)
    start = np.array([13])
    outs = []
    trees = drafted([13], [1], [[-1, -1, 1]])
    for taken, rows, chosen in ((None, [0, 1, 2], [0, 1, 2]), (trees, [0, 1, 1, 2], [0, 2, 3])):
        attention = TorchPagedAttention(config, cache, True)
        places = np.arange(13, 13 + len(rows))
        blocks = tables[0][places // BLOCK]
        attend = attention.plan(start, np.array([len(rows)]), tables[:1], places, blocks, taken)
        own = SINKS if sinks else None
        outs.append(attend(0, q[rows], k[rows], v[rows], sinks=own)[chosen])
    assert torch.equal(*outs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["batch", "chunk", "tree"])
def test_scores_are_computed_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kind: str
) -> None:
    torch.manual_seed(0)
    scoring, cpu = Scoring(0.3, 2.0, (0.5, 0.25, 0.125, 0.1), True), torch.device("cpu")
    batch, count, context = (7, 1, 12) if kind == "batch" else (1, 7, 12)
    q = torch.randn(batch, count, 4, 16)
    keys, values = torch.randn(2, batch, 2, context, 16)
    rows = torch.arange(5.0, 12.0).view(batch, count)
    sees = None
    if kind == "tree":
        sees = torch.ones(7, 12).tril(5).bool()
        sees[6, 8] = False
    reach = Reach(rows, torch.arange(12.0), sees)
    rest = (reach, window, SINKS[:4])
    at_once = ScoredAttention(scoring, cpu)(q, keys, values, *rest)
    sizes: list[int] = []
    attend = ScoredAttention.attend

    def counted(self: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(q.shape[0] * q.shape[1])
        return attend(self, q, *rest)

    monkeypatch.setattr(ScoredAttention, "attend", counted)
    few = ScoredAttention(scoring, cpu, scores_at_once=4 * 12 * 3)
    in_parts = few(q, keys, values, *rest)
    assert sizes == [3, 3, 1]
    torch.testing.assert_close(in_parts, at_once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_accepted_tokens_move_together(dtype: torch.dtype) -> None:
    """All are read first: a target may be another one's source."""
    shape = KVCacheShape(LAYERS, KV_HEADS, DIM, BLOCK, dtype)
    cache = PagedKVCache(shape, 4, torch.device("cpu"))
    size = LAYERS * 2 * KV_HEADS * DIM
    numbers = torch.arange(4 * BLOCK).repeat_interleave(size).view(4, BLOCK, LAYERS, 2, -1, DIM)
    raw = cache.data.view(torch.uint8) if dtype.itemsize == 1 else cache.data
    raw.copy_(numbers.permute(0, 2, 3, 1, 4, 5))
    cache.move_tokens(np.array([5, 9, 30], np.int32), np.array([4, 5, 9], np.int32))
    expected = torch.arange(4 * BLOCK)
    expected[[4, 5, 9]] = torch.tensor([5, 9, 30])
    for layer in range(LAYERS):
        for part in (0, 1):
            found = raw[:, layer, part].flatten(0, 1).flatten(1)
            assert (found == expected[:, None]).all()


def test_block_copies_are_whole_and_in_order() -> None:
    cache, _ = filled_cache()
    cache.data.copy_(torch.arange(80.0).view(80, 1, 1, 1, 1, 1).expand_as(cache.data))
    cache.copy_blocks([(3, 5), (5, 7)])
    assert cache.data[5].unique().tolist() == cache.data[7].unique().tolist() == [3.0]
