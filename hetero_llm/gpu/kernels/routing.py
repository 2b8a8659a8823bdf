"""Routers of mixtures of experts: which experts each row visits, and with what weights; and the
projection of those routers that compute in float32.

The references are the functions of `models.experts`; timed by `bench.kernels.experts`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import pdl_options, wait_and_release
from hetero_llm.models.experts import SMALLEST_SUM, sigmoid_top_k, softmax_top_k, sparse_mixer

MAX_GATE_ROWS = 64
"""Gate products of more rows go to the library."""
_GATE_BLOCK_K = 1024


@triton.jit
def _best(values, NUM_EXPERTS: tl.constexpr):
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
    wait_and_release(PDL)
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
        share, place = _best(left, NUM_EXPERTS)
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
def _in_kept_groups(
    corrected, lanes,
    NUM_EXPERTS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """[LANES]: whether an expert is in one of the KEPT groups whose two best have the largest
    sum."""
    group = lanes // (NUM_EXPERTS // GROUPS)
    places = tl.arange(0, GROUP_LANES)
    sums = tl.full((GROUP_LANES,), float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        own = tl.where(group == index, corrected, float("-inf"))
        best, place = _best(own, NUM_EXPERTS)
        second = tl.max(tl.where(lanes == place, float("-inf"), own), 0)
        sums = tl.where(places == index, best + second, sums)
    kept = lanes < 0
    for _ in tl.static_range(KEPT):
        chosen = tl.argmax(sums, 0)
        kept = kept | (group == chosen)
        sums = tl.where(places == chosen, float("-inf"), sums)
    return kept


@triton.jit
def sigmoid_top_k_kernel(
    logits,  # [rows, NUM_EXPERTS]
    correction,  # [NUM_EXPERTS] float32
    ids,  # [rows, K] int32
    weights,  # [rows, K] float32
    stride,
    scale,
    smallest,  # added to the sum that weights are divided by
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,  # a power of two from NUM_EXPERTS on
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    KEPT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row."""
    lanes = tl.arange(0, LANES)
    there = lanes < NUM_EXPERTS
    corrections = tl.load(correction + lanes, mask=there, other=0.0)
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(logits + row * stride + lanes, mask=there, other=0.0).to(tl.float32)
    scores = 1.0 / (1.0 + tl.exp(-found))
    left = tl.where(there, scores + corrections, float("-inf"))
    if KEPT < GROUPS:
        kept = _in_kept_groups(left, lanes, NUM_EXPERTS, LANES, GROUPS, GROUP_LANES, KEPT)
        left = tl.where(kept, left, float("-inf"))
    places = tl.arange(0, K_LANES)
    chosen = tl.zeros((K_LANES,), tl.int32)
    shares = tl.zeros((K_LANES,), tl.float32)
    for j in tl.static_range(K):
        _, place = _best(left, NUM_EXPERTS)
        share = tl.sum(tl.where(lanes == place, scores, 0.0), 0)
        chosen = tl.where(places == j, place, chosen)
        shares = tl.where(places == j, share, shares)
        left = tl.where(lanes == place, float("-inf"), left)
    if RENORMALIZE:
        shares = shares / (tl.sum(shares, 0) + smallest)
    tl.store(ids + row * K + places, chosen, mask=places < K)
    tl.store(weights + row * K + places, shares * scale, mask=places < K)


@triton.jit(do_not_specialize=["m"])
def gate_product_kernel(
    x,  # [m, k], rows x_stride apart
    weight,  # [n, k] float32
    y,  # [m, n] float32
    m,
    n,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N, tiles of M). Sums in float32 outside the tensor cores, which would round
    the factors; the first weights are loaded before the wait."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    weights = weight + features.to(tl.int64)[:, None] * k
    inputs = x + rows.to(tl.int64)[:, None] * x_stride
    known, asked = (features < n)[:, None], (rows < m)[:, None]
    w = tl.load(weights + columns[None, :], mask=known & (columns < k)[None, :], other=0.0)
    wait_and_release(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_M, BLOCK_K), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=1):
        here = start + columns[None, :]
        inside = asked
        if not EVEN_K:
            inside = asked & (here < k)
        values = tl.load(inputs + here, mask=inside, other=0.0).to(tl.float32)
        sums += w[:, None, :] * values[None, :, :]
        following = here + BLOCK_K
        w = tl.load(weights + following, mask=known & (following < k), other=0.0)
    totals = tl.sum(sums, 2)
    places = y + rows.to(tl.int64)[None, :] * n + features[:, None]
    tl.store(places, totals, mask=known & (rows < m)[None, :])


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
    wait_and_release(PDL)
    DTYPE: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    there = lanes < NUM_EXPERTS
    scores = tl.load(logits + row * stride + lanes, mask=there, other=float("-inf"))
    scores = scores.to(tl.float32)
    best, first = _best(scores, NUM_EXPERTS)
    left = tl.where(lanes == first, float("-inf"), scores)
    next_best, second = _best(left, NUM_EXPERTS)
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


def route_sigmoid(
    logits: Tensor,
    *,
    correction: Tensor,
    k: int,
    groups: int,
    kept_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`models.experts.sigmoid_top_k` in one kernel.

    Args:
        logits: [T, experts] fp32, bf16 or fp16, rows contiguous.
        correction, k, groups, kept_groups, renormalize, scale: See there.

    Returns:
        [T, k] int32 and [T, k] float32. Equal sums: the lower expert, or group, first.
    """
    rows, num_experts = logits.shape
    assert 0 < k <= num_experts // groups * kept_groups and logits.stride(1) == 1, (k, logits.shape)
    assert num_experts % groups == 0 and 0 < kept_groups <= groups, (num_experts, groups)
    assert correction.shape == (num_experts,) and correction.dtype == torch.float32
    ids, weights = _outputs(logits, k)
    if rows:
        sigmoid_top_k_kernel[(rows,)](
            logits, correction, ids, weights, logits.stride(0), scale, SMALLEST_SUM,
            NUM_EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts),
            K=k, K_LANES=triton.next_power_of_2(k), GROUPS=groups,
            GROUP_LANES=triton.next_power_of_2(groups), KEPT=kept_groups, RENORMALIZE=renormalize,
            num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip
    return ids, weights


def gate_product(x: Tensor, weight: Tensor) -> Tensor:
    """A router's projection in float32: ours for a few rows, the library's for more.

    Args:
        x: [T, hidden] fp32, bf16 or fp16, rows contiguous.
        weight: [experts, hidden] float32, contiguous.

    Returns:
        [T, experts] float32.
    """
    assert weight.dtype == torch.float32 and weight.is_contiguous() and x.stride(1) == 1
    (m, k), n = x.shape, weight.shape[0]
    assert weight.shape[1] == k, (x.shape, weight.shape)
    if not 0 < m <= MAX_GATE_ROWS:
        return gate_product_reference(x, weight)
    y = torch.empty(m, n, dtype=torch.float32, device=x.device)
    block_m = min(triton.next_power_of_2(m), 4)
    block_n = 1 if m == 1 else 2
    block_k = min(triton.next_power_of_2(k), _GATE_BLOCK_K)
    gate_product_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x, weight, y, m, n, k, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=k % block_k == 0,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return y


def gate_product_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`gate_product` in plain torch."""
    return F.linear(x.float(), weight)


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
route_sigmoid_reference = sigmoid_top_k
route_sparse_mixer_reference = sparse_mixer
