"""Attention of a long prefill chunk through cuDNN, on keys gathered from the paged cache.

cuDNN's causal mask begins at the first key, so a chunk that continues a sequence is attended in
two parts, its past without a mask and itself causally, merged by their log-sum-exp. torch's public
call does not return that, so its cuDNN operator is called by its own name; `available` tries it
once, and everything goes through our kernel where it fails.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from hetero_llm.gpu.kernels.join_parts import join_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Where a chunk's keys are: blocks [n] int64 of the whole context on the device, tokens before
    the chunk, rows of the chunk."""

    blocks: torch.Tensor
    start: int
    count: int


def attend_chunk(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    keys: ChunkKeys,
    *,
    scale: float,
) -> torch.Tensor:
    """Attends one chunk whose own keys are already stored.

    Args:
        q: [count, H, D] bfloat16 or float16, contiguous.
        key_cache, value_cache: [blocks, block_size, N, D] views of one layer.

    Returns:
        [count, H, D].
    """
    start, end = keys.start, keys.start + keys.count
    k, v = (_gather(cache, keys.blocks, q.dtype)[:end] for cache in (key_cache, value_cache))
    own, own_weight = _cudnn(q, k[start:], v[start:], True, scale)
    if start == 0:
        return own
    past, past_weight = _cudnn(q, k[:start], v[:start], False, scale)
    return join_parts(own, past, own_weight, past_weight)


@functools.cache
def available(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> bool:
    """Whether cuDNN serves this shape here; tried once on random keys, against plain torch."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    generator = torch.Generator(device).manual_seed(0)

    def random(tokens: int, heads: int) -> torch.Tensor:
        values = torch.randn(tokens, heads, head_dim, generator=generator, device=device)
        return values.to(dtype)

    q, k, v = random(64, num_heads), random(96, num_kv_heads), random(96, num_kv_heads)
    scale = head_dim**-0.5
    blocks = torch.arange(6, device=device)
    try:
        paged = (t.view(6, 16, num_kv_heads, head_dim) for t in (k, v))
        out = attend_chunk(q, *paged, ChunkKeys(blocks, 32, 64), scale=scale)
        torch.cuda.synchronize()
    except RuntimeError as error:
        logger.info("long prompts do not go through cuDNN: %s", str(error).splitlines()[0])
        return False
    group = num_heads // num_kv_heads
    keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    hidden = torch.ones(64, 96, dtype=torch.bool, device=device).triu(33)
    expected = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
    )
    return bool((out.float() - expected).abs().max() < 0.05)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, N, D] of whole blocks, in `dtype`."""
    if cache.dtype.itemsize == 1:
        gathered = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype).to(dtype)
    else:
        gathered = cache.index_select(0, blocks)
    return gathered.flatten(0, 1)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D] and the log-sum-exp [T, H] float32."""
    heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out, weight, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, causal, False, scale=scale
    )
    # cuDNN lays the output out as the queries, so this copies nothing.
    return out[0].transpose(0, 1).contiguous(), weight.view(q.shape[1], q.shape[0]).t()
