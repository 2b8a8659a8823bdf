"""Experts of a mixture with quantized weights: the grouped products of `experts`, whose weights are
read as those of `quantized_gemm` and multiplied in 16 bits.

All experts' matrices are one `PreparedMatrix`, one below the other, so a program reads the rows of
its block's expert as `matrix_quantized_kernel` reads its tile: codes become 16-bit values in
registers, the left operand of the tensor cores, and a block's rows of x are the right one. One row,
few and many differ in `block_m` alone; the more rows a block has, the less the conversions cost.
Where few rows make few programs, the inputs of `down` are split among more, and `combine` adds up
the parts. Sums are in fp32 in one order, and grids depend on the number of pairs alone, so all of
it can be captured in CUDA graphs.

Wrapper `quantized_experts`, reference `experts.experts_reference`; timed by
`bench.kernels.experts`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.expert_requests import Places
from hetero_llm.gpu.kernels.experts import (
    Biases,
    GroupedConfig,
    Groups,
    bank_groups,
    combine,
    experts,
    gated,
    grouped_options,
    grouped_product,
    groups_of,
    locate,
    pairs_of_block,
)
from hetero_llm.gpu.kernels.experts import choose as choose_plain
from hetero_llm.gpu.kernels.launch import Launch, let_next_start, wait_for_inputs
from hetero_llm.gpu.kernels.quantized_gemm import (
    PreparedMatrix,
    folds,
    load_row_scale,
    multiply_chunk,
)
from hetero_llm.gpu.kernels.quantized_gemm import choose as choose_tile
from hetero_llm.gpu.kernels.skinny_gemm import MAX_ROWS
from hetero_llm.models.config import Gate

_WARPS = 1000  # of a product that K is split for: some 8 on each multiprocessor of an H200

Weights = Tensor | PreparedMatrix
"""Of all experts: [experts, N, K], or a matrix of experts x N rows."""


# large: half of it are arguments.
@triton.jit(do_not_specialize=["num_rows", "num_pairs", "max_blocks", "steps"])
def quantized_grouped_kernel(
    x,  # [num_rows, k], x_stride apart
    data,  # [total, width] int16 lanes
    scale,  # the rest as in `PreparedMatrix`; None
    zero,
    offset,
    row_scale,
    order,  # [experts, k]
    y,  # [SPLIT_K, num_pairs, n]
    pairs,  # see Groups; None
    experts,
    num_rows,
    num_pairs,
    max_blocks,
    n,  # outputs of an expert
    total,  # rows of all experts' matrices
    k,
    width,
    padded,  # columns of data
    x_stride,
    groups,
    scale_stride,
    zero_stride,
    steps,  # tiles of K of one split
    bias,  # [total]; None
    PER_ROW: tl.constexpr,  # pairs that share a row of x
    GATE: tl.constexpr,  # activation.GateForm
    FORM: tl.constexpr,  # quantized_gemm.MatrixForm
    CHUNKS: tl.constexpr,  # of a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # of `locate`
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
    FOLD: tl.constexpr,  # see quantized_gemm.multiply_chunk
    PDL: tl.constexpr,
):
    """y[pair] = x[pair // PER_ROW] @ matrix[expert]^T, perhaps gated; grid (blocks * tiles,
    SPLIT_K)."""
    PARTS: tl.constexpr = 2 if GATE.name != "" else 1
    CHUNK: tl.constexpr = FORM.lanes * FORM.parts
    TILE: tl.constexpr = CHUNK * CHUNKS
    DTYPE: tl.constexpr = y.dtype.element_ty
    wait_for_inputs(PDL)
    block, tile = locate(tl.program_id(0), GROUP, max_blocks, tl.cdiv(n, BLOCK_N))
    expert = tl.load(experts + block).to(tl.int32)
    if expert < 0:
        return
    pair = pairs_of_block(pairs, block, num_pairs, BLOCK_M)
    there = pair < num_pairs
    rows = tl.where(there, pair // PER_ROW, num_rows)
    # With gates, a tile is BLOCK_N of them and then their BLOCK_N partners. Features past the last
    # one belong to whatever follows in the matrix, and are not stored.
    lanes = tl.arange(0, PARTS * BLOCK_N)
    features = expert * (PARTS * n) + (lanes // BLOCK_N) * n + tile * BLOCK_N + lanes % BLOCK_N
    if order is not None:
        order += expert * k
    matrix = data, scale, zero, offset, order, width, groups, scale_stride, zero_stride
    sums = tl.zeros((PARTS * BLOCK_N, BLOCK_M), tl.float32)
    begin = tl.program_id(1) * steps * TILE
    stop = tl.minimum(padded, begin + steps * TILE)
    for start in tl.range(begin, stop, TILE, num_stages=STAGES):
        for piece in tl.static_range(CHUNKS):
            sums = multiply_chunk(
                *(sums, start + piece * CHUNK, x, matrix, features, rows),
                *(num_rows, total, k, x_stride, FORM, EVEN_N, EVEN_K, EVICT, FOLD),
            )
    # Not earlier: the next kernel's programs would take shared memory from this one's.
    let_next_start(PDL)
    sums = sums * load_row_scale(row_scale, features, total)
    if bias is not None:
        own = (tile * BLOCK_N + lanes % BLOCK_N < n) & (tl.program_id(1) == 0)
        sums += tl.load(bias + features, mask=own, other=0.0).to(tl.float32)[:, None]
    if PARTS == 2:
        sums = gated(tl.reshape(sums, (2, BLOCK_N, BLOCK_M)), GATE, DTYPE)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out = y + tl.program_id(1).to(tl.int64) * num_pairs * n
    pointers = out + pair.to(tl.int64)[None, :] * n + outputs[:, None]
    tl.store(pointers, sums.to(DTYPE), mask=(outputs < n)[:, None] & there[None, :])


def plan_quantized_product(
    x: Tensor,
    matrix: PreparedMatrix,
    groups: Groups,
    *,
    y: Tensor,
    activation: Gate,
    config: GroupedConfig,
    bias: Tensor | None = None,
) -> Launch:
    """The launch that writes a grouped product into `y`; see `experts` for x and the groups.

    Args:
        y: [num_pairs, N] of x's dtype; with `split_k` above 1 [split_k, num_pairs, N] float32.
        matrix: Of experts x N rows; with an activation experts x 2N, gates of an expert first.
        config: With `block_k` a multiple of the matrix's chunk.
        bias: A number for each row of the matrix, contiguous, added before the activation; or None.
    """
    (rows, k), n, splits = x.shape, y.shape[-1], config.split_k
    assert y.numel() == splits * groups.num_pairs * n and not (activation and splits > 1)
    assert matrix.shape[1] == k and matrix.shape[0] % ((2 if activation else 1) * n) == 0
    assert y.dtype == (x.dtype if splits == 1 else torch.float32) and config.swap
    assert bias is None or bias.numel() == matrix.shape[0]
    assert config.block_k % matrix.chunk == 0, (config, matrix.chunk)
    grid, options = grouped_options(x, y, groups, bias, activation=activation, config=config)
    options |= {
        "FORM": matrix.form,
        "CHUNKS": config.block_k // matrix.chunk,
        "EVEN_K": k % config.block_k == 0 and k == matrix.padded_columns,
        "FOLD": folds(matrix, config.block_m),
    }
    tiles = triton.cdiv(matrix.padded_columns, config.block_k)
    arguments = (
        *(x, matrix.data, *matrix.tensors, y, groups.pairs, groups.experts),
        *(rows, groups.num_pairs, grid[0], n, matrix.shape[0], k, matrix.data.shape[1]),
        *(matrix.padded_columns, x.stride(0), matrix.groups, *matrix.strides),
        *(triton.cdiv(tiles, splits), bias),
    )
    return Launch(quantized_grouped_kernel, (grid[0] * grid[1], splits), arguments, options)


def choose(groups: Groups, matrix: PreparedMatrix, n: int, parts: int) -> GroupedConfig:
    """The tile that `quantized_gemm` has for as many rows: by estimate, not yet by measurement.

    Args:
        n: Outputs of an expert.
        parts: 2 with an activation, whose tiles have as many gates as partners, else 1.
    """
    block_m = groups.block_m
    tile = choose_tile(min(block_m, MAX_ROWS), matrix)
    config = GroupedConfig(
        block_m, tile.block_n // parts, tile.block_k, tile.num_warps, tile.num_stages
    )
    if block_m <= MAX_ROWS:
        warps = groups.experts.numel() * triton.cdiv(n, config.block_n) * config.num_warps
        tiles = triton.cdiv(matrix.padded_columns, config.block_k)
        splits = 1
        while parts == 1 and warps * splits < _WARPS and tiles >= 4 * splits and splits < 8:
            splits *= 2
        return dataclasses.replace(config, split_k=splits)
    # Half of the columns, or fewer stages: twice the rows of x take as much shared memory.
    block_k = max(matrix.chunk, tile.block_k // 2 // matrix.chunk * matrix.chunk)
    stages = 3 if block_k <= 128 else 2
    return dataclasses.replace(config, block_k=block_k, num_stages=stages, group=16)


def serves(x: Tensor, weights: Weights) -> bool:
    """Whether the weights are multiplied as they are."""
    if isinstance(weights, Tensor):
        return True
    return x.dtype in (torch.bfloat16, torch.float16) and weights.shape[1] % 16 == 0


def quantized_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    activation: Gate,
    biases: Biases | None = None,
) -> Tensor:
    """`experts` with quantized weights; one of the two may be plain.

    Codes become values in x's dtype, exactly but for nf4. Float32 rows, and matrices whose columns
    are no multiple of 16, take weights that are dequantized for the call.

    Args:
        x: [T, hidden] fp32, bf16 or fp16, rows contiguous.
        ids: [T, k] int, contiguous, each in [0, experts).
        weights: [T, k] float32, contiguous.
        gate_up: Of 2 * inner rows and hidden columns an expert, gates first.
        down: Of hidden rows and inner columns an expert.
        activation: One that `experts.serves` knows.
        biases: See `experts`.

    Returns:
        [T, hidden] in x's dtype.
    """
    (rows, k), hidden = ids.shape, x.shape[1]
    num_experts = down.shape[0] // (1 if isinstance(down, Tensor) else hidden)
    if rows == 0:
        return torch.empty_like(x)
    if not (serves(x, gate_up) and serves(x, down)):
        first, second = (dense_weights(w, num_experts, x.dtype) for w in (gate_up, down))
        return experts(x, ids, weights, first, second, activation=activation, biases=biases)
    configs = choose_plain(rows, k, num_experts, x.itemsize)
    groups = groups_of(ids, num_experts, configs[0].block_m)
    parts = _pair_outputs(
        *(x, groups, gate_up, down), count=num_experts, activation=activation, biases=biases,
        configs=configs,
    )  # fmt: skip
    return combine(parts, weights, x.dtype)


def quantized_bank_experts(
    x: Tensor,
    places: Places,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    table: Tensor,
    activation: Gate,
    biases: Biases | None = None,
) -> Tensor:
    """`experts.bank_experts` with a bank of quantized weights, which `serves` knows; one of the
    two may be plain.

    Args:
        weights: Unused: `wait_add` weights all outputs.
        gate_up, down: Of all slots.
    """
    (rows, k), hidden = places.slots.shape, x.shape[1]
    assert serves(x, gate_up) and serves(x, down)
    count = down.shape[0] // (1 if isinstance(down, Tensor) else hidden)
    configs = choose_plain(rows, k, len(table), x.itemsize)
    groups = bank_groups(places, table, configs[0].block_m)
    return _pair_outputs(
        *(x, groups, gate_up, down), count=count, activation=activation, biases=biases,
        configs=configs,
    )  # fmt: skip


def _pair_outputs(
    x: Tensor,
    groups: Groups,
    gate_up: Weights,
    down: Weights,
    *,
    count: int,
    activation: Gate,
    biases: Biases | None,
    configs: tuple[GroupedConfig, ...],
) -> Tensor:
    """[pairs, hidden], or [split_k, pairs, hidden]. `count`: of experts that the weights hold;
    `configs`: of the plain ones among the two products."""
    of_first, of_second = biases or (None, None)
    product = partial(pair_product, groups=groups, count=count)
    middle = product(x, gate_up, config=configs[0], activation=activation, bias=of_first)
    return product(middle, down, config=configs[1], activation="", bias=of_second)


def pair_product(
    x: Tensor,
    weights: Weights,
    *,
    groups: Groups,
    count: int,
    config: GroupedConfig,
    activation: Gate,
    bias: Tensor | None,
) -> Tensor:
    """`grouped_product` with weights of either kind.

    Args:
        count: of experts that the weights hold.
        config: of plain weights.

    Returns:
        [pairs, N] in x's dtype; [split_k, pairs, N] float32 where quantized weights without an
        activation have their inputs split.
    """
    if isinstance(weights, Tensor):
        return grouped_product(x, weights, groups, activation=activation, config=config, bias=bias)
    parts = 2 if activation else 1
    n = weights.shape[0] // count // parts
    config = choose(groups, weights, n, parts)
    y = outputs_of(x, groups, n, config)
    plan_quantized_product(
        x, weights, groups, y=y, activation=activation, config=config, bias=bias
    )()
    return y


def outputs_of(x: Tensor, groups: Groups, n: int, config: GroupedConfig) -> Tensor:
    """Memory for `y` of `plan_quantized_product`."""
    if config.split_k == 1:
        return torch.empty((groups.num_pairs, n), dtype=x.dtype, device=x.device)
    shape = config.split_k, groups.num_pairs, n
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def dense_weights(weights: Weights, num_experts: int, dtype: torch.dtype) -> Tensor:
    """[experts, N, K] in `dtype`."""
    if isinstance(weights, Tensor):
        return weights
    out = torch.empty(weights.shape, dtype=dtype, device=weights.device)
    return dequantize_to(weights, out).view(num_experts, -1, weights.shape[1])
