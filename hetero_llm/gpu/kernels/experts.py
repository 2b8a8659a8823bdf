"""Experts of a mixture: gated MLPs of which each row visits a few, without asking the host.

A *pair* is a row and one of its experts; pair p belongs to row p // k. Three paths:

- one row: `vector_gate_up_kernel` and `vector_down_kernel` read the weights of the row's experts at
  the speed of memory, as `skinny_gemm.vector_product_kernel` does; the second also adds up;
- a few rows: `align_kernel` sorts the pairs by expert into blocks of `block_m`, and
  `grouped_product_kernel`, a program per block and tile of features, reads weights as the left
  operand of the tensor cores ("swap AB"), so that rows are padded to 8 at least and not to 64;
- many rows: the same with tiles for arithmetic, rows on the left.

Grids depend on the number of pairs alone, so all of it can be captured in CUDA graphs: there are as
many blocks as the worst routing takes, and those without pairs return at once. (Blocks of one
expert: "MegaBlocks", Gale et al. 2022.) Sums are in fp32, in an order that is the same in every
batch for one path and configuration; nothing is added up by atomics.

Wrapper `experts`, reference `experts_reference`; timed by `bench.kernels.experts`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hetero_llm.gpu.kernels.activation import (
    activate,
    clamped_swish,
    gate_form,
    serves_gate,
)
from hetero_llm.gpu.kernels.expert_requests import Places
from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    Launch,
    let_next_start,
    pdl_options,
    wait_and_release,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.skinny_gemm import add_products, load_row
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import Experts

_CHUNK = 1024
_COMBINE_TILE = 1024
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ALL_BLOCKS = 1 << 16  # times the tiles of a product it still fits 32 bits


Biases = tuple[Tensor, Tensor]
"""Of gate_up and of down."""


@dataclass(frozen=True)
class GroupedConfig:
    """How one grouped product is launched; sizes in elements.

    Attributes:
        block_m: Pairs of a block, all of one expert.
        block_n: Output features of a program.
        block_k: Inputs read at a time.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline through shared memory.
        swap: Weights are the left operand.
        group: Blocks whose programs follow each other for a tile of features, so that weights that
            several of them read come from L2; 0 is all.
        evict_first: Weights are the first to leave L2.
        split_k: Programs that share the inputs of a tile; above 1 only for quantized weights
            without an activation, whose `combine` adds up the parts.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = True
    group: int = 0
    evict_first: bool = False
    split_k: int = 1


@dataclass(frozen=True)
class VectorConfig:
    """How the products of one row are launched; `block_k` is 256 a warp at most.

    Attributes:
        block_n: Output features of a program; with gates, half as many of each kind.
    """

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class Groups:
    """Pairs by expert.

    Attributes:
        pairs: [blocks * block_m] int32, `num_pairs` where a block has no pair; None: block b has
            the one pair b.
        experts: [blocks] int, of each block; -1: the block is empty.
        num_pairs: T * k.
        block_m: Pairs of a block.
    """

    pairs: Tensor | None
    experts: Tensor
    num_pairs: int
    block_m: int


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks that the worst routing takes: each visited expert may have one that is not full."""
    visited = min(num_pairs, num_experts)
    return visited + (num_pairs - visited) // block_m


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def align_kernel(
    ids,  # [num_pairs] int, negative for a pair that is left out
    pairs,  # [max_blocks * BLOCK_M] int32
    experts,  # [max_blocks] int32
    slots,  # [NUM_EXPERTS] int32: what `experts` says of an expert's blocks; None: its number
    num_pairs,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above NUM_EXPERTS
    PDL: tl.constexpr,
):
    """A program per expert: counts all, and writes its own pairs, in order."""
    wait_and_release(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in tl.range(0, num_pairs, CHUNK, num_stages=1):
        index = start + lanes
        chosen = tl.load(ids + index, mask=index < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        chosen = tl.where(chosen < 0, NUM_EXPERTS, chosen)
        counts += tl.histogram(chosen, BINS)
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0))
    own = tl.sum(tl.where(bins == expert, blocks, 0))
    name = expert if slots is None else tl.load(slots + expert)
    for block in tl.range(first, first + own, num_stages=1):
        tl.store(experts + block, name)
    for block in tl.range(tl.sum(blocks) + expert, max_blocks, NUM_EXPERTS, num_stages=1):
        tl.store(experts + block, -1)
    place = first * BLOCK_M
    for start in tl.range(0, num_pairs, CHUNK, num_stages=1):
        index = start + lanes
        chosen = tl.load(ids + index, mask=index < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(mine, 0) - 1, index, mask=mine != 0)
        place += tl.sum(mine)
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(pairs + rest, num_pairs, mask=rest < (first + own) * BLOCK_M)


@triton.jit
def locate(block_of, GROUP: tl.constexpr, max_blocks, tiles):
    """Block and tile of a program: blocks of a group first, then tiles, then groups."""
    group = block_of // (GROUP * tiles)
    inside = block_of % (GROUP * tiles)
    size = tl.minimum(max_blocks - group * GROUP, GROUP)
    return group * GROUP + inside % size, inside // size


@triton.jit
def pairs_of_block(pairs, block, num_pairs, BLOCK_M: tl.constexpr):
    """[BLOCK_M]; see `Groups`."""
    lanes = tl.arange(0, BLOCK_M)
    if pairs is None:
        return tl.where(lanes == 0, block, num_pairs)
    else:
        return tl.load(pairs + block * BLOCK_M + lanes)


@triton.jit
def _matrix(pointer, rows, columns, ROWS_FIRST: tl.constexpr):
    """Pointers to [rows, columns], or transposed."""
    if ROWS_FIRST:
        return pointer + (rows[:, None] + columns[None, :])
    else:
        return pointer + (rows[None, :] + columns[:, None])


@triton.jit
def _outer_and(rows, columns, ROWS_FIRST: tl.constexpr):
    if ROWS_FIRST:
        return rows[:, None] & columns[None, :]
    else:
        return rows[None, :] & columns[:, None]


@triton.jit
def gated(sums, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gate) * up of [2, ...] sums, rounded where `GatedActivation.plain` rounds."""
    NAME: tl.constexpr = GATE.name
    ALPHA: tl.constexpr = GATE.alpha
    LIMIT: tl.constexpr = GATE.limit
    if len(sums.shape) == 3:
        gate, up = tl.split(tl.permute(sums, (1, 2, 0)))
    else:
        gate, up = tl.split(tl.permute(sums, (1, 0)))
    if NAME == "clamped":
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        return clamped_swish(gate, up, ALPHA, LIMIT)
    else:
        active = activate(gate.to(DTYPE).to(tl.float32), NAME).to(DTYPE).to(tl.float32)
        return active * up.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def grouped_product_kernel(
    x,  # [rows, k], x_stride apart
    weight,  # [experts, n, k]; gated [experts, 2 * n, k]
    y,  # [num_pairs, n]
    pairs,  # see Groups; None
    experts,
    num_pairs,
    max_blocks,
    n,
    k,
    x_stride,
    bias,  # [experts, n]; gated [experts, 2 * n]; None
    PER_ROW: tl.constexpr,  # pairs that share a row of x
    GATE: tl.constexpr,  # activation.GateForm
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[pair] = x[pair // PER_ROW] @ weight[expert]^T, perhaps gated; grid (blocks * tiles)."""
    PARTS: tl.constexpr = 2 if GATE.name != "" else 1
    DTYPE: tl.constexpr = y.dtype.element_ty
    wait_for_inputs(PDL)
    block, tile = locate(tl.program_id(0), GROUP, max_blocks, tl.cdiv(n, BLOCK_N))
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    rows = pairs_of_block(pairs, block, num_pairs, BLOCK_M)
    there = rows < num_pairs
    sources = tl.where(there, rows // PER_ROW, 0).to(tl.int64) * x_stride
    # With gates, a tile is BLOCK_N of them and then their BLOCK_N partners.
    parts = tl.arange(0, PARTS * BLOCK_N)
    features = tile * BLOCK_N + parts % BLOCK_N
    weights = (expert * (PARTS * n) + (parts // BLOCK_N) * n + features) * k
    columns = tl.arange(0, BLOCK_K)
    if SWAP:
        sums = tl.zeros((PARTS * BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inner = start + columns
        inside = (inner < k) | EVEN_K
        w_pointers = _matrix(weight, weights, inner, SWAP)
        if EVEN_N and EVEN_K:
            w = tl.load(w_pointers, eviction_policy=EVICT)
        else:
            w_mask = _outer_and(features < n, inside, SWAP)
            w = tl.load(w_pointers, mask=w_mask, other=0.0, eviction_policy=EVICT)
        x_mask = _outer_and(there, inside, not SWAP)
        row = tl.load(_matrix(x, sources, inner, not SWAP), mask=x_mask, other=0.0)
        if IN_INTERPRETER:
            w, row = w.to(tl.float32), row.to(tl.float32)
        if SWAP:
            sums = tl.dot(w, row, sums, input_precision="ieee")
        else:
            sums = tl.dot(row, w, sums, input_precision="ieee")
    if bias is not None:
        places = expert * (PARTS * n) + (parts // BLOCK_N) * n + features
        more = tl.load(bias + places, mask=features < n, other=0.0).to(tl.float32)
        sums += more[:, None] if SWAP else more[None, :]
    # Not earlier: the next kernel's programs would take shared memory from this one's.
    let_next_start(PDL)
    if PARTS == 2:
        if SWAP:
            sums = gated(tl.reshape(sums, (2, BLOCK_N, BLOCK_M)), GATE, DTYPE)
        else:
            by_part = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N)), (1, 0, 2))
            sums = gated(by_part, GATE, DTYPE)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_pointers = _matrix(y, rows.to(tl.int64) * n, outputs, not SWAP)
    tl.store(out_pointers, sums.to(DTYPE), mask=_outer_and(there, outputs < n, not SWAP))


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    parts,  # [SPLIT_K, num_rows * K, n]
    shares,  # [num_rows * K] float32
    y,  # [num_rows, n]
    num_rows,
    n,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row] = sum of shares[pair] * parts[pair] over the row's pairs; grid (rows, tiles of n)."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < n
    total = tl.zeros((TILE,), tl.float32)
    for j in tl.static_range(K):
        place = (row * K + j) * n + columns
        part = tl.load(parts + place, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLIT_K):
            part += tl.load(parts + split * num_rows * K * n + place, mask=inside, other=0.0)
        part = part.to(y.dtype.element_ty).to(tl.float32)
        total += part * tl.load(shares + row * K + j)
    tl.store(y + row * n + columns, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _row_products(
    x, weight, rows, there, columns, k_pairs, DTYPE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] fp32: weight rows (offsets in int32 pairs, where there are any) times the row x.

    Every tile is loaded into registers before the one before it is summed; see `skinny_gemm`.
    """
    sums = tl.zeros((BLOCK_N, PAIRS // 4), tl.float32)
    w = _load_rows(weight, rows, there, columns, k_pairs, EVEN_K)
    row = load_row(x, columns, k_pairs, EVEN_K)
    for _ in tl.range(PAIRS, k_pairs, PAIRS, num_stages=1):
        sums = add_products(sums, w, row, BLOCK_N, PAIRS, DTYPE)
        columns += PAIRS
        w = _load_rows(weight, rows, there, columns, k_pairs, EVEN_K)
        row = load_row(x, columns, k_pairs, EVEN_K)
    return tl.sum(add_products(sums, w, row, BLOCK_N, PAIRS, DTYPE), axis=1)


@triton.jit
def _load_rows(weight, rows, there, columns, k_pairs, EVEN_K: tl.constexpr):
    pointers = weight + (rows[:, None] + columns[None, :])
    inside = there[:, None]
    if not EVEN_K:
        inside &= (columns < k_pairs)[None, :]
    return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def vector_gate_up_kernel(
    x,  # [k / 2] int32: pairs of neighbours
    weight,  # [experts, 2 * n, k / 2] int32
    y,  # [K, n], the dtype of the product
    ids,  # [K] int
    n,
    k_pairs,  # k / 2
    bias,  # [experts, 2 * n]; None
    GATE: tl.constexpr,  # activation.GateForm
    BLOCK_N: tl.constexpr,  # of gates and their partners together
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row; grid (tiles of n, K). Of pairs with a negative id nothing is computed."""
    HALF: tl.constexpr = BLOCK_N // 2
    DTYPE: tl.constexpr = y.dtype.element_ty
    wait_and_release(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    parts = tl.arange(0, BLOCK_N)
    features = tl.program_id(0) * HALF + parts % HALF
    rows = (expert * (2 * n) + (parts // HALF) * n + features) * k_pairs
    columns = tl.arange(0, BLOCK_K // 2)
    sums = _row_products(
        x, weight, rows, features < n, columns, k_pairs, DTYPE, EVEN_K, BLOCK_N, BLOCK_K // 2
    )
    if bias is not None:
        places = expert * (2 * n) + (parts // HALF) * n + features
        sums += tl.load(bias + places, mask=features < n, other=0.0).to(tl.float32)
    active = gated(tl.reshape(sums, (2, HALF)), GATE, DTYPE)
    outputs = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(y + pair * n + outputs, active.to(DTYPE), mask=outputs < n)


@triton.jit
def vector_down_kernel(
    x,  # [K, k / 2] int32
    weight,  # [experts, n, k / 2] int32
    y,  # [n], DTYPE or float32
    ids,  # [K] int
    shares,  # [K] float32
    n,
    k_pairs,
    bias,  # [experts, n]; None
    DTYPE: tl.constexpr,  # of the products
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SKIP: tl.constexpr,  # there may be negative ids, whose pairs are left out
    PDL: tl.constexpr,
):
    """One row; grid (tiles of n): the products of all its experts, weighted and added up."""
    wait_and_release(PDL)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for pair in tl.static_range(K):
        expert = tl.load(ids + pair).to(tl.int64)
        if not SKIP or expert >= 0:
            total += _expert_of_row(
                x, weight, shares, bias, features, pair, expert, n, k_pairs,
                DTYPE, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    tl.store(y + features, total.to(y.dtype.element_ty), mask=features < n)


@triton.jit
def _expert_of_row(
    x, weight, shares, bias, features, pair, expert, n, k_pairs,
    DTYPE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] fp32: one pair's output, rounded as a product's, times its share."""
    columns = tl.arange(0, BLOCK_K // 2)
    sums = _row_products(
        x + pair * k_pairs, weight, (expert * n + features) * k_pairs, features < n, columns,
        k_pairs, DTYPE, EVEN_K, BLOCK_N, BLOCK_K // 2,
    )  # fmt: skip
    if bias is not None:
        inside = features < n
        sums += tl.load(bias + expert * n + features, mask=inside, other=0.0).to(tl.float32)
    return sums.to(DTYPE).to(tl.float32) * tl.load(shares + pair)


def align(
    ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    chunk: int = _CHUNK,
    slots: Tensor | None = None,
) -> Groups:
    """Sorts pairs by expert into blocks, on the device.

    Args:
        ids: [T, k] int, contiguous, each in [0, num_experts), or negative: the pair is left out.
        num_experts: Of the layer.
        block_m: Pairs of a block.
        chunk: Pairs that a program of the sort looks at together, at least 64.
        slots: [num_experts] int32: where an expert's weights are; None: at its number.
    """
    assert ids.is_contiguous(), ids.stride()
    assert slots is None or (slots.shape == (num_experts,) and slots.is_contiguous())
    num_pairs = ids.numel()
    blocks = most_blocks(num_pairs, num_experts, block_m)
    pairs = torch.empty(blocks * block_m, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    align_kernel[(num_experts,)](
        ids,
        pairs,
        experts,
        slots,
        num_pairs,
        blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_M=block_m,
        CHUNK=min(chunk, max(64, triton.next_power_of_2(num_pairs))),
        BINS=triton.next_power_of_2(num_experts + 1),
        num_warps=4,
        **pdl_options(ids.device),
    )
    return Groups(pairs, experts, num_pairs, block_m)


def groups_of(ids: Tensor, num_experts: int, block_m: int) -> Groups:
    """`align`, or without sorting where there is one row."""
    if ids.shape[0] == 1:
        return Groups(None, ids.view(-1), ids.numel(), block_m)
    return align(ids, num_experts, block_m)


def plan_grouped_product(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    *,
    y: Tensor,
    activation: Gate,
    config: GroupedConfig,
    bias: Tensor | None = None,
) -> Launch:
    """The launch that writes a grouped product into `y`; see `grouped_product` for the shapes."""
    k, n = x.shape[1], weight.shape[1] // (2 if activation else 1)
    assert weight.is_contiguous() and weight.shape[2] == k and config.split_k == 1
    assert x.dtype == weight.dtype == y.dtype, (x.dtype, weight.dtype, y.dtype)
    assert y.shape == (groups.num_pairs, n)
    assert bias is None or bias.shape == weight.shape[:2]
    grid, options = grouped_options(x, y, groups, bias, activation=activation, config=config)
    options |= {
        "BLOCK_K": config.block_k,
        "SWAP": config.swap,
        "EVEN_K": k % config.block_k == 0,
    }
    arguments = (x, weight, y, groups.pairs, groups.experts, groups.num_pairs, grid[0])
    arguments += (n, k, x.stride(0), bias)
    return Launch(grouped_product_kernel, (grid[0] * grid[1], 1), arguments, options)


def grouped_options(
    x: Tensor,
    y: Tensor,
    groups: Groups,
    bias: Tensor | None,
    *,
    activation: Gate,
    config: GroupedConfig,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """What all launches of grouped products have; counts the launch (`pdl_options`).

    Args:
        y: [..., N].

    Returns:
        Blocks and tiles of N, and options.
    """
    per_row, n = groups.num_pairs // len(x), y.shape[-1]
    assert len(x) * per_row == groups.num_pairs and config.block_m == groups.block_m
    assert x.stride(1) == 1 and y.is_contiguous() and (bias is None or bias.is_contiguous())
    options = {
        "PER_ROW": per_row,
        "GATE": gate_form(activation),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "GROUP": config.group or ALL_BLOCKS,
        "EVEN_N": n % config.block_n == 0,
        "EVICT": "evict_first" if config.evict_first else "",
        "num_warps": config.num_warps,
        **pdl_options(x.device),
    }
    return (groups.experts.numel(), triton.cdiv(n, config.block_n)), options


def grouped_product(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    *,
    activation: Gate,
    config: GroupedConfig,
    bias: Tensor | None = None,
) -> Tensor:
    """Each pair's row of `x` times its expert's matrix.

    Args:
        x: [T, K], rows contiguous; or [num_pairs, K].
        weight: [experts, N, K] of the same dtype, contiguous; with an activation [experts, 2 * N,
            K], gates first.
        groups: Of `align`, with the configuration's block_m.
        activation: Of the gates: activation(gate) * up; "" is the plain product.
        config: How to launch it.
        bias: [experts, N], with an activation [experts, 2 * N]; added before it.

    Returns:
        [num_pairs, N] in x's dtype; rounded as `GatedActivation.plain` rounds.
    """
    n = weight.shape[1] // (2 if activation else 1)
    y = torch.empty((groups.num_pairs, n), dtype=x.dtype, device=x.device)
    plan_grouped_product(x, weight, groups, y=y, activation=activation, config=config, bias=bias)()
    return y


def combine(parts: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The weighted sums of k rows each.

    Args:
        parts: [T * k, n], or [split_k, T * k, n] to be added up and rounded to `dtype` first.
        weights: [T, k] float32.

    Returns:
        [T, n] in `dtype`, by default that of `parts`.
    """
    assert parts.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
    (num_rows, k), n = weights.shape, parts.shape[-1]
    splits = parts.numel() // (num_rows * k * n)
    assert parts.numel() == splits * num_rows * k * n, (parts.shape, weights.shape)
    assert splits == 1 or parts.numel() < 1 << 31, "the kernel counts parts of splits in 32 bits"
    y = torch.empty((num_rows, n), dtype=dtype or parts.dtype, device=parts.device)
    combine_kernel[(num_rows, triton.cdiv(n, _COMBINE_TILE))](
        parts,
        weights,
        y,
        num_rows,
        n,
        K=k,
        SPLIT_K=splits,
        TILE=_COMBINE_TILE,
        num_warps=4,
        **pdl_options(parts.device),
    )
    return y


def vector_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *,
    activation: Gate, configs: tuple[VectorConfig, VectorConfig], biases: Biases | None = None,
) -> Tensor:  # fmt: skip
    """`experts` of one row, in 16 bits; `configs` of gate_up and of down."""
    y = torch.empty_like(x)
    _vector_experts(
        (x, ids, weights), (gate_up, down), y,
        activation=activation, configs=configs, biases=biases, skip=False,
    )  # fmt: skip
    return y


def _vector_experts(
    row: tuple[Tensor, Tensor, Tensor], matrices: tuple[Tensor, Tensor], y: Tensor, *,
    activation: Gate, configs: tuple[VectorConfig, VectorConfig], biases: Biases | None, skip: bool,
) -> None:  # fmt: skip
    """As above. `row`: x, ids and weights; `y`: written, [1, hidden] of x's dtype or float32;
    `skip`: ids may be negative."""
    (x, ids, weights), (gate_up, down) = row, matrices
    assert x.shape[0] == 1 and x.is_contiguous() and gate_up.dtype == x.dtype == down.dtype
    (k, hidden, inner), options = (ids.shape[1], *down.shape[1:]), pdl_options(x.device)
    assert hidden % 2 == 0 and inner % 2 == 0, (hidden, inner)
    first, second = configs
    first_bias, second_bias = biases or (None, None)
    middle = torch.empty((k, inner), dtype=x.dtype, device=x.device)
    vector_gate_up_kernel[(triton.cdiv(inner, first.block_n // 2), k)](
        x.view(torch.int32), gate_up.view(torch.int32), middle, ids, inner, hidden // 2,
        first_bias, GATE=gate_form(activation), BLOCK_N=first.block_n, BLOCK_K=first.block_k,
        EVEN_K=hidden % first.block_k == 0, num_warps=first.num_warps, **options,
    )  # fmt: skip
    vector_down_kernel[(triton.cdiv(hidden, second.block_n),)](
        middle.view(torch.int32), down.view(torch.int32), y, ids, weights, hidden, inner // 2,
        second_bias, DTYPE=_TRITON_TYPES[x.dtype], K=k, BLOCK_N=second.block_n,
        BLOCK_K=second.block_k, EVEN_K=inner % second.block_k == 0, SKIP=skip,
        num_warps=second.num_warps, **options,
    )  # fmt: skip


def vector_config(block_n: int, k: int) -> VectorConfig:
    """As many warps as tiles of 256 inputs divide `k`, up to 4."""
    warps = next((w for w in (4, 2) if k % (256 * w) == 0), 1)
    return VectorConfig(block_n, 256 * warps, warps)


def choose(rows: int, k: int, num_experts: int, itemsize: int) -> tuple[GroupedConfig, ...]:
    """Configurations of gate_up and of down for `rows` rows with `k` of the experts each.

    A block has room for 1.5 times the mean number of an expert's rows, so few need a second one.
    """
    room = -(-3 * rows * k // (2 * num_experts))
    block_m = min(128, max(8, triton.next_power_of_2(min(rows, room))))
    if itemsize == 4:  # exact products, outside the tensor cores
        block_m = min(32, block_m)
        exact = GroupedConfig(block_m, 32, 32, num_stages=2)
        return exact, dataclasses.replace(exact, block_n=64)
    return _BY_BLOCK[block_m]


# Of gate_up, whose tiles have twice as many features, and of down.
_BY_BLOCK = {
    8: (GroupedConfig(8, 32, 128, num_stages=6), GroupedConfig(8, 32, 256, num_stages=4)),
    16: (GroupedConfig(16, 32, 128, num_stages=5), GroupedConfig(16, 32, 256, num_stages=4)),
    32: (GroupedConfig(32, 32, 128, num_stages=4), GroupedConfig(32, 64, 128, num_stages=4)),
    64: (GroupedConfig(64, 64, 64, num_stages=4), GroupedConfig(64, 128, 64, num_stages=4)),
    128: (
        GroupedConfig(128, 128, 64, num_warps=8, num_stages=4, swap=False, group=16),
        GroupedConfig(128, 256, 64, num_warps=8, num_stages=4, swap=False, group=16),
    ),
}


serves = serves_gate
"""Whether `experts` can compute an activation."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Gate,
    biases: Biases | None = None,
) -> Tensor:
    """The weighted sum of the outputs of each row's experts; `Experts.function` on a GPU.

    Args:
        x: [T, hidden] fp32, bf16 or fp16, rows contiguous.
        ids: [T, k] int, contiguous, each in [0, experts).
        weights: [T, k] float32, contiguous.
        gate_up: [experts, 2 * inner, hidden] in x's dtype, contiguous.
        down: [experts, hidden, inner] in x's dtype, contiguous.
        activation: One that `serves` knows.
        biases: Of gate_up [experts, 2 * inner] and of down [experts, hidden], contiguous; or None.

    Returns:
        [T, hidden] in x's dtype.
    """
    (rows, k), num_experts = ids.shape, down.shape[0]
    if rows == 0:
        return torch.empty_like(x)
    hidden, inner = down.shape[1:]
    if _is_vector(x, down):
        return vector_experts(
            *(x.contiguous(), ids, weights, gate_up, down),
            activation=activation,
            configs=_vector_configs(hidden, inner),
            biases=biases,
        )
    first, second = choose(rows, k, num_experts, x.itemsize)
    groups = groups_of(ids, num_experts, first.block_m)
    of_first, of_second = biases or (None, None)
    middle = grouped_product(x, gate_up, groups, activation=activation, config=first, bias=of_first)
    parts = grouped_product(middle, down, groups, activation="", config=second, bias=of_second)
    return combine(parts, weights)


def _is_vector(x: Tensor, down: Tensor) -> bool:
    """Whether the kernels of one row serve."""
    hidden, inner = down.shape[1:]
    few = x.shape[0] == 1 and x.dtype != torch.float32
    return few and hidden % 8 == 0 and inner % 8 == 0


def _vector_configs(hidden: int, inner: int) -> tuple[VectorConfig, VectorConfig]:
    return vector_config(8, hidden), vector_config(4 if hidden <= 4096 else 8, inner)


def bank_groups(places: Places, table: Tensor, block_m: int) -> Groups:
    """The pairs that have a slot, by slot.

    Args:
        table: [experts] int32 of the layer, contiguous: the slot of each.
    """
    if places.slots.shape[0] == 1:
        return Groups(None, places.slots.view(-1), places.slots.numel(), block_m)
    return align(places.experts, len(table), block_m, slots=table)


def bank_experts(
    x: Tensor,
    places: Places,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    table: Tensor,
    activation: Gate,
    biases: Biases | None = None,
) -> Tensor:
    """Outputs of the pairs whose expert is in a bank, for `expert_requests.wait_add` to add up.
    Pairs without a slot cost nothing.

    Args:
        x: [T, hidden], rows contiguous; T > 0.
        places: Of `expert_requests.post`.
        weights: [T, k] float32, contiguous.
        gate_up: [slots, 2 * inner, hidden] in x's dtype, contiguous.
        down: [slots, hidden, inner].
        table: [experts] int32 of the layer, contiguous: the slot of each.
        biases: By slots; see `experts`.

    Returns:
        `parts` of `wait_add`.
    """
    (rows, k), (hidden, inner) = places.slots.shape, down.shape[1:]
    if _is_vector(x, down):
        y = torch.empty((1, hidden), dtype=torch.float32, device=x.device)
        _vector_experts(
            *((x.contiguous(), places.slots, weights), (gate_up, down), y),
            activation=activation,
            configs=_vector_configs(hidden, inner),
            biases=biases,
            skip=True,
        )
        return y
    first, second = choose(rows, k, len(table), x.itemsize)
    groups = bank_groups(places, table, first.block_m)
    of_first, of_second = biases or (None, None)
    middle = grouped_product(x, gate_up, groups, activation=activation, config=first, bias=of_first)
    return grouped_product(middle, down, groups, activation="", config=second, bias=of_second)


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Gate,
    biases: Biases | None = None,
) -> Tensor:
    """`experts` as the torch path computes it; takes a `QuantizedStack` for a weight, too."""
    with torch.device("meta"):
        module = Experts(1, 1, 1, activation)
    if biases is not None:
        module.gate_up_bias, module.down_bias = (nn.Parameter(b, False) for b in biases)
    return module.plain(x, ids, weights, gate_up, down)
