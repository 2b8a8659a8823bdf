"""Products of fp8 rows with an fp8 matrix, for rows that fill a tile of the tensor cores or two.

y = (rows' codes @ matrix's codes^T) * scales of rows * scales of features + bias. The library takes
the same codes (`torch._scaled_mm`) and is slow where features are few: of 128 rows the product with
4,096 features of 14,336 inputs takes 37 us there and 23 us here, where K is split, that with 28,672
features 35 and 36 (one H200, commit 9f2ad46). As in `quantized_gemm`, the weight tile is the left
operand and the rows are the right one. Sums stay in the tensor cores, which keep about 14 bits of
them on Hopper, as the library's do.

Wrapper `fp8_linear`, reference `fp8_linear_reference`; timed by `bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    Launch,
    let_next_start,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows
from hetero_llm.gpu.kernels.quantized_gemm import (
    MAX_ROWS,
    PreparedMatrix,
    fits_tiles,
    load_inputs,
    load_row_scale,
)
from hetero_llm.gpu.kernels.skinny_gemm import (
    SkinnyConfig,
    finish_tile,
    load_weight,
    room_for_partials,
    steps_per_split,
    tile_options,
)

_BLOCK_M = 128
_MULTIPROCESSORS = 132  # of the card that launches were measured on
_MOST_SPLITS = 4


@triton.jit(do_not_specialize=["m", "steps"])
def fp8_gemm_kernel(
    codes,  # [m, width] e4m3
    scales,  # [m] float32
    data,  # [n, width] e4m3
    row_scale,  # [n] float32
    bias,  # [n] or None
    y,  # [m, n]
    partials,  # [tiles, SPLIT_K, BLOCK_M, BLOCK_N] fp32, or None
    counters,  # [tiles] int32, zero between launches, or None
    m,
    n,
    width,
    steps,  # tiles of K of one split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVICT: tl.constexpr,
    ROW_TILES: tl.constexpr,  # programs that share a tile of features
    PDL: tl.constexpr,
):
    """Grid (tiles of N x ROW_TILES, SPLIT_K). Every split has at least one tile of K."""
    tile = tl.program_id(0)
    features = tile // ROW_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1) * steps * BLOCK_K
    stop = tl.minimum(width, start + steps * BLOCK_K)
    scales_of_features = load_row_scale(row_scale, features, n)
    wait_for_inputs(PDL)
    # Here, so that it comes with the first tile and not after the last one.
    scales_of_rows = tl.load(scales + rows, mask=rows < m, other=0.0)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for place in tl.range(0, stop - start, BLOCK_K, num_stages=STAGES):
        columns = start + place + tl.arange(0, BLOCK_K)
        w = load_weight(data, features, columns, n, width, EVEN_N, EVEN_K, EVICT)
        right = load_inputs(codes, None, columns, rows, m, width, width, EVEN_K)
        if IN_INTERPRETER:
            w = w.to(tl.float32)
        sums = tl.dot(w, right, sums)
    # Not earlier: the next kernel's programs would take shared memory from this one's.
    let_next_start(PDL)
    sums = sums * scales_of_features * scales_of_rows
    finish_tile(
        *(sums, y, bias, partials, counters, features, rows, m, n, tile, None, None),
        *(HAS_BIAS, SPLIT_K, None),
    )


def serves(matrix: PreparedMatrix) -> bool:
    """Whether there is such a product: fp8 with a scale for each row and nothing else. The tensor
    cores have 8 bits from sm_89 on; which numbers of rows are worth it is measured."""
    return matrix.kind == "fp8" and matrix.group == 0 and matrix.data.shape[1] % 8 == 0


def fits(config: SkinnyConfig, m: int, matrix: PreparedMatrix) -> bool:
    """Whether a product of m rows can be launched so."""
    return (
        config.block_m >= 16  # with 8, Triton 3.6 takes the tensor cores' 16-bit products
        and config.prefetch == 0
        and not (config.waits and m > config.block_m)
        and fits_tiles(config, m, matrix, several=True)
    )


def shared_bytes(config: SkinnyConfig) -> int:
    """Shared memory of a program: nothing but the pipeline's tiles."""
    return config.num_stages * config.block_k * (config.block_n + config.block_m)


def choose(m: int, matrix: PreparedMatrix) -> SkinnyConfig:
    """A launch of a product of m rows that fits, by what was the fastest of 128 rows in the 8B
    shape.

    K is split until programs are about as many as multiprocessors, no further: merging costs more
    than a second program on some of them. If each has a multiprocessor of its own, its pipeline
    takes nearly all shared memory, else half of it. Programs of 128 features, which read the rows
    less often, are for matrices that have enough of them.
    """
    row_tiles = triton.cdiv(m, _BLOCK_M)
    block_n = 64
    tiles = triton.cdiv(matrix.shape[0], block_n) * row_tiles
    if tiles > 2 * _MULTIPROCESSORS:
        block_n = 128
        tiles = triton.cdiv(matrix.shape[0], block_n) * row_tiles
    split = 1
    while split < _MOST_SPLITS and 10 * tiles * split < 9 * _MULTIPROCESSORS:
        split *= 2
    alone = tiles * split <= _MULTIPROCESSORS
    width = matrix.padded_columns
    block_k = min(256 if alone else 128, max(32, 1 << (width.bit_length() - 1)))
    stages = 4 if block_n == 64 else 3
    config = SkinnyConfig(_BLOCK_M, block_n, block_k, split, num_warps=4, num_stages=stages)
    while not fits(config, m, matrix):  # few columns
        config = dataclasses.replace(config, split_k=config.split_k // 2)
    return config


def plan_launch(
    rows: QuantizedRows,
    matrix: PreparedMatrix,
    bias: Tensor | None,
    *,
    y: Tensor,
    config: SkinnyConfig,
) -> Launch:
    """The launch that writes rows @ matrix^T + bias into `y`; see `fp8_linear`."""
    m, n = rows.num_rows, matrix.shape[0]
    assert fits(config, m, matrix), f"{config} does not fit m={m}, n={n}"
    row_tiles = triton.cdiv(m, config.block_m)
    tiles = triton.cdiv(n, config.block_n) * row_tiles
    partials, counters = room_for_partials(tiles * config.block_n, config, y.device)
    data = matrix.data.view(torch.float8_e4m3fn)
    width = data.shape[1]
    assert rows.codes.shape == (m, width) and rows.codes.dtype == data.dtype, rows.codes.shape
    assert rows.codes.is_contiguous() and rows.scales.shape == (m, 1)
    assert y.shape == (m, n) and y.is_contiguous() and y.dtype == rows.dtype
    assert bias is None or (bias.dtype == rows.dtype and bias.is_contiguous())
    options = tile_options(config, n, bias, y.device)
    options |= {
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "EVEN_K": width % config.block_k == 0,
        "ROW_TILES": row_tiles,
    }
    arguments = (rows.codes, rows.scales, data, matrix.row_scale, bias, y, partials, counters)
    arguments += (m, n, width, steps_per_split(width, config))
    return Launch(fp8_gemm_kernel, (tiles, config.split_k), arguments, options)


def fp8_linear(
    rows: QuantizedRows,
    matrix: PreparedMatrix,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """rows @ matrix^T + bias with the tensor cores' fp8 products.

    As with `skinny_gemm`, products of one device must run one after the other, and may be captured
    in a CUDA graph after one run outside of it.

    Args:
        rows: [M, K], M at most 256, quantized for this matrix.
        matrix: Of N rows and K columns; `serves` says yes to it.
        bias: [N] of the rows' dtype.
        config: How to launch it; by default what `choose` says.

    Returns:
        [M, N] in the rows' dtype.
    """
    assert serves(matrix) and rows.num_rows <= MAX_ROWS
    y = torch.empty((rows.num_rows, matrix.shape[0]), dtype=rows.dtype, device=matrix.device)
    if y.numel() > 0:
        config = config or choose(rows.num_rows, matrix)
        plan_launch(rows, matrix, bias, y=y, config=config)()
    return y


def fp8_linear_reference(
    rows: QuantizedRows, matrix: PreparedMatrix, bias: Tensor | None = None
) -> Tensor:
    """`fp8_linear` in plain torch, with float64 sums."""
    assert matrix.row_scale is not None
    y = rows.codes.double() @ matrix.data.view(torch.float8_e4m3fn).double().t()
    y = y * rows.scales.double() * matrix.row_scale.double()
    if bias is not None:
        y = y + bias.double()
    return y.to(rows.dtype)
