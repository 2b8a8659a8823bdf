"""Attention of prefill chunks through libraries, on keys gathered from the paged cache.

- One long chunk: cuDNN, the fastest on Hopper. Its causal mask begins at the first key, so a chunk
  that continues a sequence is attended in two parts, its past without a mask and itself causally,
  joined by their log-sum-exp. cuDNN plans a shape when it first sees it, some 50 ms on an H200. So
  shapes are rounded up to few (`rounded_rows`), those of whole prompts are planned at start
  (`plan_cudnn`), and others go through cuDNN where that is worth a plan (`cudnn_pays`).
- All others: FlashAttention-2, which takes sequences of any lengths in one call, windows included,
  and plans nothing.

torch's public calls return no log-sum-exp and take no ragged batch in all versions that we support,
so we call its operators by their own names. Each is tried once against plain torch; where one
fails, our kernel serves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero_llm.gpu.kernels.join_parts import join_parts

logger = logging.getLogger(__name__)

_FINE, _COARSE, _COARSE_FROM = 512, 1024, 4096
"""Rows of a shape are multiples of `_FINE`, and of `_COARSE` from `_COARSE_FROM` on."""
_PAST = 1024
"""Keys of a past without a mask are multiples of this; the rest is attended with the chunk."""
_WHOLE_TOKENS, _LONG_TOKENS = 1024, 4096
"""Least tokens of a chunk without a past that go through cuDNN: alone in its step, and in any."""
_NEW_SCORES, _REUSED_SCORES = 1 << 26, 1 << 24
"""Least tokens x past of a chunk with a past. FlashAttention takes 50 ms and 12 ms longer than
cuDNN for these numbers of scores, in 32 layers of 32 heads. Planning a shape costs the first;
full chunks of long prompts meet their shapes again."""
_TRIED = 64  # tokens of a trial


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The keys of one chunk.

    Attributes:
        blocks: [n] int64 block ids of the whole context, on the device.
        start: tokens before the chunk.
        count: tokens of the chunk.
    """

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
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends one chunk whose own keys are already stored.

    Args:
        q: [count, H, D] bfloat16 or float16, contiguous.
        key_cache, value_cache: [blocks, block_size, N, D] views of one layer.
        kv_scales: as of `kernels.paged_attention`.

    Returns:
        [count, H, D].
    """
    behind = keys.start % _PAST
    past, end = keys.start - behind, keys.start + keys.count
    k, v = _gather((key_cache, value_cache), keys.blocks, q.dtype, kv_scales)
    # Queries of zeros stand for tokens between the past and the chunk; keys of zeros behind the
    # chunk are hidden from it.
    own = slice(behind, behind + keys.count)
    rows = rounded_rows(own.stop)
    queries = _padded(q, own.start, rows)
    out, weight = cudnn_attention(
        queries, *(_padded(t[past:end], 0, rows) for t in (k, v)), True, scale
    )
    out, weight = out[own], weight[own]
    if past == 0:
        return out
    queries = _padded(q, 0, rounded_rows(keys.count))
    before, before_weight = cudnn_attention(queries, k[:past], v[:past], False, scale)
    return join_parts(out, before[: keys.count], weight, before_weight[: keys.count])


def rounded_rows(count: int) -> int:
    """The rows that cuDNN computes for `count` tokens."""
    step = _FINE if count < _COARSE_FROM else _COARSE
    return -(-count // step) * step


def cudnn_pays(start: int, count: int, *, alone: bool, full: bool) -> bool:
    """Whether a chunk is faster through cuDNN than through FlashAttention, plans included.

    Args:
        start, count: tokens before the chunk, and its own.
        alone: no other chunk of the step goes through a library.
        full: it is about as long as a step may be.
    """
    if start > 0:
        return start * count >= (_REUSED_SCORES if full else _NEW_SCORES)
    if count >= _LONG_TOKENS:
        return True
    # FlashAttention has 0.77 of cuDNN's speed at 1,024 tokens, 0.56 at 4,096.
    share = 1.125 if count < 2048 else 1.25
    return alone and count >= _WHOLE_TOKENS and rounded_rows(count) <= share * count


def _padded(values: torch.Tensor, before: int, rows: int) -> torch.Tensor:
    """[rows, H, D], contiguous: `values` [T, H, D] with `before` rows of zeros ahead of them, and
    the others behind."""
    after = rows - before - len(values)
    if before == after == 0:
        return values
    padded = values.new_empty((rows, *values.shape[1:]))
    padded[:before].zero_()
    padded[before : before + len(values)] = values
    padded[rows - after :].zero_()
    return padded


@dataclass(frozen=True, slots=True)
class RaggedKeys:
    """The keys of several chunks.

    Attributes:
        blocks: [n] int64 block ids of all contexts, one after the other, on the device.
        starts: [S + 1] int32 token at which each context begins.
        used: [S] int32 tokens in use of each context.
        row_starts: [S + 1] int32 row at which each chunk begins.
        max_rows, max_keys: longest chunk, longest context.
    """

    blocks: torch.Tensor
    starts: torch.Tensor
    used: torch.Tensor
    row_starts: torch.Tensor
    max_rows: int
    max_keys: int


def attend_ragged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    keys: RaggedKeys,
    *,
    scale: float,
    window: int | None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends several chunks whose own keys are already stored.

    Args:
        q: [T, H, D], the chunks' rows one after the other; others as of `attend_chunk`.
    """
    k, v = _gather((key_cache, value_cache), keys.blocks, q.dtype, kv_scales)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, keys.row_starts, keys.starts, keys.max_rows, keys.max_keys, 0.0, True, False),
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=keys.used,
    )
    return out


@functools.cache
def cudnn_works(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> bool:
    """Whether `attend_chunk` serves this shape here."""
    start = _PAST + 32
    trial = _Trial(dtype, num_heads, num_kv_heads, head_dim, device, past=start)

    def attend() -> torch.Tensor:
        paged = (trial.paged(t) for t in (trial.k, trial.v))
        keys = ChunkKeys(torch.arange((start + _TRIED) // 16, device=device), start, _TRIED)
        return attend_chunk(trial.q, *paged, keys, scale=trial.scale)

    return trial.agrees("cuDNN", attend, None)


@functools.cache
def plan_cudnn(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    most_tokens: int,
) -> None:
    """Lets cuDNN plan the shapes of whole prompts of up to `most_tokens` tokens, each once."""
    shapes = {rounded_rows(count) for count in range(_WHOLE_TOKENS, most_tokens + 1, _FINE)}
    for rows in sorted(shapes):
        q = torch.zeros((rows, num_heads, head_dim), dtype=dtype, device=device)
        kv = torch.zeros((rows, num_kv_heads, head_dim), dtype=dtype, device=device)
        cudnn_attention(q, kv, kv, True, 1.0)


@functools.cache
def flash_works(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> bool:
    """Whether `attend_ragged` serves this shape here."""
    trial = _Trial(dtype, num_heads, num_kv_heads, head_dim, device, past=32)

    def attend() -> torch.Tensor:
        paged = (trial.paged(torch.cat((t[:32], t))) for t in (trial.k, trial.v))

        def numbers(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        # A sequence of 19 keys in two blocks comes before the one that is compared.
        keys = RaggedKeys(
            torch.arange(8, device=device),
            numbers(0, 32, 128),
            numbers(19, 96),
            numbers(0, 3, 67),
            64,
            96,
        )
        q = torch.cat((trial.q[:3], trial.q))
        return attend_ragged(q, *paged, keys, scale=trial.scale, window=40)[3:]

    return trial.agrees("FlashAttention", attend, 40)


class _Trial:
    """A random chunk of `_TRIED` tokens after `past` others."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
        *,
        past: int,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype = dtype
        self.scale = dim**-0.5
        self.q = self._random(_TRIED, heads, dim)
        self.k, self.v = (self._random(past + _TRIED, kv_heads, dim) for _ in range(2))

    def _random(self, *sizes: int) -> torch.Tensor:
        device = self._generator.device
        return torch.randn(sizes, generator=self._generator, device=device).to(self._dtype)

    def paged(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.reshape(-1, 16, *tokens.shape[1:])

    def agrees(self, name: str, attend: Callable[[], torch.Tensor], window: int | None) -> bool:
        """Whether `attend` runs and agrees with plain torch."""
        if self._dtype not in (torch.bfloat16, torch.float16) or self.q.device.type != "cuda":
            return False
        try:
            ours = attend()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("prompts do not go through %s: %s", name, reason)
            return False
        group = self.q.shape[1] // self.k.shape[1]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.float(), keys) * self.scale
        end = len(self.k)
        distance = torch.arange(end - _TRIED, end).unsqueeze(1) - torch.arange(end)
        hidden = (distance < 0) | (distance >= (window or end + 1))
        weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        return bool((ours.float() - expected).abs().max() < 0.05)


def _gather(
    caches: tuple[torch.Tensor, torch.Tensor],
    blocks: torch.Tensor,
    dtype: torch.dtype,
    kv_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole blocks, [tokens, N, D] in `dtype`, multiplied with their scales."""
    gathered = []
    for part, cache in enumerate(caches):
        if cache.dtype.itemsize == 1:
            found = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype).to(dtype)
        else:
            found = cache.index_select(0, blocks)
        if kv_scales is not None:  # multiplied in float32, and rounded once
            found.mul_(kv_scales[part, :, None])
        gathered.append(found.flatten(0, 1))
    return gathered[0], gathered[1]


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D] and the log-sum-exp [T, H] float32, both contiguous."""
    heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out, weight, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, causal, False, scale=scale
    )
    # cuDNN lays the output out as the queries, so this copies nothing.
    weight = weight.view(q.shape[1], q.shape[0]).t()
    return out[0].transpose(0, 1).contiguous(), weight.contiguous()
