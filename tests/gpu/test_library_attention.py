"""Chunks through cuDNN: the shapes that it is given, and what is made of its results."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu import library_attention
from hetero_llm.gpu.library_attention import ChunkKeys, attend_chunk, cudnn_pays, rounded_rows

HEADS, KV_HEADS, DIM, BLOCK = 2, 1, 8, 16
SCALE = DIM**-0.5


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32: [T, H, D] and the log-sum-exp [T, H]."""
    k, v = (t.float().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * SCALE
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1).t().contiguous()


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1024), (0, 1030), (0, 40), (37, 700), (1024, 512), (2047, 1100), (1030, 4097)],
)
def test_rounded_shapes_give_the_chunks_attention(
    monkeypatch: pytest.MonkeyPatch, start: int, count: int
) -> None:
    """Whatever the cache holds behind the chunk, not a number included."""
    shapes = []

    def cudnn(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert scale == SCALE and q.is_contiguous()
        assert len(q) == rounded_rows(len(q)) and len(k) % 512 == 0
        shapes.append((len(q), len(k), causal))
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1) & causal
        return attention(q, k, v, hidden)

    monkeypatch.setattr(library_attention, "cudnn_attention", cudnn)
    monkeypatch.setattr(library_attention, "join_parts", joined)
    end = start + count
    generator = torch.Generator().manual_seed(start + count)
    columns = -(-end // BLOCK)
    k, v = (
        torch.full((columns + 3, BLOCK, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
        for _ in range(2)
    )
    blocks = torch.randperm(columns + 3, generator=generator)[:columns]
    plain = [torch.randn(end, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2)]
    for cache, values in zip((k, v), plain, strict=True):
        spread = torch.full((columns * BLOCK, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
        spread[:end] = values
        cache[blocks] = spread.view(columns, BLOCK, KV_HEADS, DIM)
    q = torch.randn(count, HEADS, DIM, generator=generator).bfloat16()
    got = attend_chunk(q, k, v, ChunkKeys(blocks, start, count), scale=SCALE)
    places = torch.arange(end)
    expected, _ = attention(q, *plain, places[start:].unsqueeze(1) < places)
    assert got.shape == q.shape and (got.float() - expected.float()).abs().max() < 0.02
    assert len(shapes) == (1 if start < 1024 else 2)


def joined(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    share = torch.sigmoid(other - weight).unsqueeze(-1)
    return (first.float() + (second.float() - first.float()) * share).to(first.dtype)


def pays(start: int, count: int, *, alone: bool = True, full: bool = False) -> bool:
    return cudnn_pays(start, count, alone=alone, full=full)


def test_prompts_of_any_length_have_few_shapes() -> None:
    shapes = {rounded_rows(n) for n in range(1, 16385) if pays(0, n)}
    assert len(shapes) == 19 and max(shapes) == 16384
    for count in range(1024, 16385):
        if pays(0, count):
            assert count <= rounded_rows(count) <= 1.25 * count


def test_what_goes_through_cudnn() -> None:
    assert pays(0, 1024) and not pays(0, 1025) and not pays(0, 1023) and pays(0, 3000)
    assert not pays(0, 1024, alone=False) and pays(0, 4096, alone=False)
    assert not pays(30_000, 1000) and not pays(4096, 4096) and pays(8192, 8192)
    assert pays(8192, 2048, full=True) and not pays(4096, 2048, full=True)
