"""Routers of mixtures of experts: which experts each row visits, and with what weights.

The references are the functions of `models.experts`; timed by `bench.kernels.experts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import let_next_start, pdl_options, wait_for_inputs
from hetero_llm.models.experts import softmax_top_k, sparse_mixer


@triton.jit
def _best(values, lanes, NUM_EXPERTS: tl.constexpr):
    """The largest value and its place, the lowest on ties; always that of an expert."""
    return tl.max(values, 0), tl.minimum(tl.argmax(values, 0), NUM_EXPERTS - 1)


@triton.jit
def softmax_top_k_kernel(
    logits,  # [rows, NUM_EXPERTS]
    ids,  # [rows, K] int32
    weights,  # [rows, K] float32
    stride,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,  # a power of two from NUM_EXPERTS on
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    there = lanes < NUM_EXPERTS
    scores = tl.load(logits + row * stride + lanes, mask=there, other=float("-inf"))
    scores = scores.to(tl.float32)
    powers = tl.exp(scores - tl.max(scores, 0))
    left = tl.where(there, powers / tl.sum(powers, 0), -1.0)
    places = tl.arange(0, K_LANES)
    chosen = tl.zeros((K_LANES,), tl.int32)
    shares = tl.zeros((K_LANES,), tl.float32)
    for j in tl.static_range(K):
        share, place = _best(left, lanes, NUM_EXPERTS)
        chosen = tl.where(places == j, place, chosen)
        shares = tl.where(places == j, share, shares)
        left = tl.where(lanes == place, -1.0, left)
    if RENORMALIZE:
        shares = shares / tl.sum(shares, 0)
    if ROUNDED:
        shares = shares.to(logits.dtype.element_ty).to(tl.float32)
    tl.store(ids + row * K + places, chosen, mask=places < K)
    tl.store(weights + row * K + places, shares, mask=places < K)


@triton.jit
def _share(scores, left, best, place, lanes, limit, DTYPE: tl.constexpr):
    """See `models.experts._weight_among_near`; rounded to DTYPE after each operation."""
    scale = tl.maximum(tl.abs(scores), best)
    distance = (best - left).to(DTYPE).to(tl.float32) / scale
    near = tl.where(distance.to(DTYPE).to(tl.float32) > limit, float("-inf"), left)
    powers = tl.exp(near - tl.max(near, 0))
    share = tl.sum(tl.where(lanes == place, powers, 0.0), 0) / tl.sum(powers, 0)
    return share.to(DTYPE).to(tl.float32)


@triton.jit
def sparse_mixer_kernel(
    logits,  # [rows, NUM_EXPERTS]
    ids,  # [rows, 2] int32
    weights,  # [rows, 2] float32
    stride,
    limit,  # 2 * jitter, of the precision of the logits
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    DTYPE: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    there = lanes < NUM_EXPERTS
    scores = tl.load(logits + row * stride + lanes, mask=there, other=float("-inf"))
    scores = scores.to(tl.float32)
    best, first = _best(scores, lanes, NUM_EXPERTS)
    left = tl.where(lanes == first, float("-inf"), scores)
    next_best, second = _best(left, lanes, NUM_EXPERTS)
    # Lanes beyond the experts have an infinite distance at any scale.
    known = tl.where(there, scores, 1.0)
    tl.store(ids + row * 2, first)
    tl.store(ids + row * 2 + 1, second)
    tl.store(weights + row * 2, _share(known, scores, best, first, lanes, limit, DTYPE))
    share = _share(known, left, next_best, second, lanes, limit, DTYPE)
    tl.store(weights + row * 2 + 1, share)


def route_top_k(
    logits: Tensor, *, k: int, renormalize: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """`models.experts.softmax_top_k` in one kernel.

    Args:
        logits: [T, experts] fp32, bf16 or fp16, rows contiguous.
        k: Experts of a row, at most as many as there are.
        renormalize, rounded: See there.

    Returns:
        [T, k] int32 and [T, k] float32. Equal logits: the lower expert first.
    """
    rows, num_experts = logits.shape
    assert 0 < k <= num_experts and logits.stride(1) == 1, (k, logits.shape)
    ids, weights = _outputs(logits, k)
    if rows:
        softmax_top_k_kernel[(rows,)](
            logits, ids, weights, logits.stride(0),
            NUM_EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts),
            K=k, K_LANES=triton.next_power_of_2(k), RENORMALIZE=renormalize, ROUNDED=rounded,
            num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip
    return ids, weights


def route_sparse_mixer(logits: Tensor, *, jitter: float) -> tuple[Tensor, Tensor]:
    """`models.experts.sparse_mixer` in one kernel.

    Args:
        logits: [T, experts] fp32, bf16 or fp16, rows contiguous; two experts at least.
        jitter: See there.

    Returns:
        [T, 2] int32 and [T, 2] float32.
    """
    rows, num_experts = logits.shape
    assert num_experts > 1 and logits.stride(1) == 1, logits.shape
    ids, weights = _outputs(logits, 2)
    if rows:
        limit = torch.tensor(2 * jitter, dtype=logits.dtype, device="cpu").item()
        sparse_mixer_kernel[(rows,)](
            logits, ids, weights, logits.stride(0), limit,
            NUM_EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts),
            num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip
    return ids, weights


def _outputs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], k
    return (
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        torch.empty(shape, dtype=torch.float32, device=logits.device),
    )


route_top_k_reference = softmax_top_k
route_sparse_mixer_reference = sparse_mixer
