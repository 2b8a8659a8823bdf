"""Products of fp8 rows with an fp8 matrix, for as few rows as leave them bound by memory.

y = (rows' codes @ matrix's codes^T) * scales of rows * scales of features + bias. Codes go from
shared memory to the tensor cores as they are: nothing is converted, so that a program keeps more
bytes in flight than `quantized_gemm`'s, and K is split, which the library does not do for so few
rows. As there, the weight tile is the left operand and the rows are the right one.

Rows come in one part, rounded to e4m3, or in two, whose sum is the row in 16 bits
(`quantize_rows.QuantizedRows`): the second part costs a second pass of the tensor cores over a tile
that is in shared memory, and no bytes of weights.

Hopper's tensor cores keep about 14 bits of the sums of such products. With two parts the sums of
each tile of K are added up in float32 (as DeepSeek-V3 does it, technical report, 3.3.2); with one
part they stay in the tensor cores, as the library's do.

Wrapper `fp8_linear`, reference `fp8_linear_reference`; timed by `bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    Launch,
    let_next_start,
    pdl_options,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, load_row_scale
from hetero_llm.gpu.kernels.skinny_gemm import (
    SkinnyConfig,
    finish_tile,
    room_for_partials,
    steps_per_split,
)

MAX_ROWS = 256
"""Of one product. Which numbers of rows take it is up to `quantized_product`."""

_BLOCKS = (16, 32, 64, 128)  # with 8, Triton 3.6 takes the tensor cores' 16-bit products
_SHARED_BYTES = 227 << 10  # of a multiprocessor from sm_90 on


@triton.jit
def _load_codes(codes, columns, rows, m, width, EVEN_K: tl.constexpr):
    """[columns, rows] of a part of the rows; zeros outside of it."""
    inside = (rows < m)[None, :]
    if not EVEN_K:
        inside = inside & (columns < width)[:, None]
    pointers = codes + rows.to(tl.int64)[None, :] * width + columns[:, None]
    values = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_last")
    if IN_INTERPRETER:
        values = values.to(tl.float32)
    return values


@triton.jit
def _load_weight(
    data, features, columns, n, width, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """[features, columns] of the matrix; zeros outside of it."""
    pointers = data + features.to(tl.int64)[:, None] * width + columns[None, :]
    if EVEN_N and EVEN_K:
        values = tl.load(pointers, eviction_policy=EVICT)
    else:
        inside = (features < n)[:, None] & (columns < width)[None, :]
        values = tl.load(pointers, mask=inside, other=0.0, eviction_policy=EVICT)
    if IN_INTERPRETER:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["m", "steps"])
def fp8_gemm_kernel(
    codes,  # [PARTS, m, width] e4m3, parts part_stride apart
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
    part_stride,
    steps,  # tiles of K of one split
    PARTS: tl.constexpr,
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
        w = _load_weight(data, features, columns, n, width, EVEN_N, EVEN_K, EVICT)
        right = _load_codes(codes, columns, rows, m, width, EVEN_K)
        if PARTS == 1:
            sums = tl.dot(w, right, sums)
        else:
            rest = _load_codes(codes + part_stride, columns, rows, m, width, EVEN_K)
            of_tile = tl.dot(w, right)
            sums += tl.dot(w, rest, of_tile)
    # Not earlier: the next kernel's programs would take shared memory from this one's.
    let_next_start(PDL)
    sums = sums * scales_of_features * scales_of_rows
    finish_tile(
        *(sums, y, bias, partials, counters, features, rows, m, n, tile, None, None),
        *(HAS_BIAS, SPLIT_K, BLOCK_N, BLOCK_M, 0, 0, 1, 1),
    )


def serves(matrix: PreparedMatrix) -> bool:
    """Whether there is such a product: fp8 with a scale for each row and nothing else. The tensor
    cores have 8 bits from sm_89 on; which numbers of rows are worth it is measured."""
    return matrix.kind == "fp8" and matrix.group == 0 and matrix.data.shape[1] % 8 == 0


def fits(config: SkinnyConfig, m: int, matrix: PreparedMatrix) -> bool:
    """Whether a product of m rows can be launched so."""
    rows = min(m, config.block_m) if config.block_m == _BLOCKS[-1] else m
    padded = -(-matrix.padded_columns // 16) * 16
    return (
        0 < m <= MAX_ROWS
        and config.block_m in _BLOCKS
        and config.prefetch == 0
        and not (config.waits and m > config.block_m)
        and config.fits(rows, matrix.shape[0], padded)
    )


def shared_bytes(config: SkinnyConfig, parts: int) -> int:
    """Shared memory of a program: nothing but the pipeline's tiles."""
    return config.num_stages * config.block_k * (config.block_n + parts * config.block_m)


def choose(m: int, matrix: PreparedMatrix, parts: int) -> SkinnyConfig:
    """A launch of a product of m rows that fits, by estimate.

    A program has a warp group, so that the tensor cores read both operands from shared memory, and
    its pipeline takes at most half of a multiprocessor's, so that one program loads while another
    one begins or ends. K is split until there are two programs for each multiprocessor.
    """
    block_m = next((size for size in _BLOCKS if m <= size), _BLOCKS[-1])
    n = matrix.shape[0]
    block_n = 128 if n >= _WIDE or block_m == 128 else 64
    block_k = min(128 if block_n == 128 else 256, _whole(matrix.padded_columns))
    config = SkinnyConfig(block_m, block_n, block_k, 1, 4, num_stages=6)
    while config.num_stages > 2 and shared_bytes(config, parts) > _SHARED_BYTES // 2:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    tiles = triton.cdiv(n, block_n) * triton.cdiv(m, block_m)
    for split in (2, 4, 8):
        wider = dataclasses.replace(config, split_k=split)
        if tiles * config.split_k >= _PROGRAMS or not fits(wider, m, matrix):
            break
        config = wider
    return config


_WIDE = 1 << 14  # features that make programs enough of 128
_PROGRAMS = 200


def _whole(width: int) -> int:
    """The largest power of two that is no larger, 32 at least: what the tensor cores take."""
    return max(32, 1 << (width.bit_length() - 1))


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
    parts = rows.parts
    assert fits(config, m, matrix), f"{config} does not fit m={m}, n={n}"
    row_tiles = triton.cdiv(m, config.block_m)
    tiles = triton.cdiv(n, config.block_n) * row_tiles
    partials, counters = room_for_partials(tiles * config.block_n, config, y.device)
    data = matrix.data.view(torch.float8_e4m3fn)
    width = data.shape[1]
    options: dict[str, Any] = {
        "PARTS": parts,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "STAGES": config.num_stages,
        "EVEN_N": n % config.block_n == 0,
        "EVEN_K": width % config.block_k == 0,
        "HAS_BIAS": bias is not None,
        "EVICT": "evict_first" if config.evict_first else "",
        "ROW_TILES": row_tiles,
        "num_warps": config.num_warps,
        **pdl_options(y.device),
    }
    arguments = (rows.codes, rows.scales, data, matrix.row_scale, bias, y, partials, counters)
    part_stride = rows.codes.stride(0) if parts == 2 else 0
    arguments += (m, n, width, part_stride, steps_per_split(width, config))
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
        rows: [M, K], in one part or two, M at most 256.
        matrix: Of N rows and K columns; `serves` says yes to it.
        bias: [N] of the rows' dtype.
        config: How to launch it; by default what `choose` says.

    Returns:
        [M, N] in the rows' dtype.
    """
    assert serves(matrix) and rows.num_rows <= MAX_ROWS
    y = torch.empty((rows.num_rows, matrix.shape[0]), dtype=rows.dtype, device=matrix.device)
    if y.numel() > 0:
        config = config or choose(rows.num_rows, matrix, rows.parts)
        plan_launch(rows, matrix, bias, y=y, config=config)()
    return y


def fp8_linear_reference(
    rows: QuantizedRows, matrix: PreparedMatrix, bias: Tensor | None = None
) -> Tensor:
    """`fp8_linear` in plain torch, with float64 sums."""
    assert matrix.row_scale is not None
    codes = rows.codes.view(rows.parts, -1, rows.codes.shape[-1]).double().sum(0)
    y = codes[: rows.num_rows] @ matrix.data.view(torch.float8_e4m3fn).double().t()
    y = y * rows.scales.double() * matrix.row_scale.double()
    if bias is not None:
        y = y + bias.double()
    return y.to(rows.dtype)
