"""Activations in 8 bits, a scale for each row (token), and the scales of products of such rows.

Two kernels: `quantize_rows_kernel` writes a row's codes in the order of a prepared matrix's codes,
so that library products of both need no other order of the matrix; `scale_products_kernel` turns
the int32 sums of an int8 product into outputs. Wrappers `quantize_rows` and `scale_products`,
references `quantize_rows_reference` and `scale_products_reference`; timed by
`bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    INTERPRETED,
    let_next_start,
    pdl_options,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a row becomes."""

_TILE = 1024
_SMALLEST = 1e-30  # a row of zeros has a scale, too


@triton.jit
def _nearest_fp8(values):
    """What e4m3 can hold, ties to even: the interpreter's conversion gets carries wrong."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (values + 24576.0) - 24576.0  # 1.5 * 2^14: the last bit is 2^-9
    return tl.where(tl.abs(values) < 0.015625, subnormal, normal)


@triton.jit
def _quantize(values, inverse, FP8: tl.constexpr):
    """float32 -> codes of 8 bits in int32, the number nearest to each."""
    scaled = values * inverse
    if FP8:
        if IN_INTERPRETER:
            scaled = _nearest_fp8(scaled)
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        codes = tl.floor(tl.minimum(tl.maximum(scaled, -127.0), 127.0) + 0.5).to(tl.int32) & 255
    return codes


@triton.jit
def quantize_rows_kernel(
    codes,  # [m, width] int16 lanes
    scales,  # [m] float32
    x,  # [m, k], rows x_stride apart
    order,  # [k] int32, or None
    k,
    x_stride,
    width,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, k, TILE):
        values = tl.load(x + row * x_stride + start + inner, mask=start + inner < k, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    peak = tl.maximum(tl.max(largest, 0), SMALLEST)
    tl.store(scales + row, peak / LARGEST)
    inverse = LARGEST / peak
    for start in tl.range(0, width, TILE):
        lane = start + inner
        first = lane // LANES * (2 * LANES) + lane % LANES
        low = _load_columns(x + row * x_stride, order, first, k)
        high = _load_columns(x + row * x_stride, order, first + LANES, k)
        pair = _quantize(low, inverse, FP8) | _quantize(high, inverse, FP8) << 8
        tl.store(codes + row * width + lane, pair.to(tl.int16), mask=lane < width)


@triton.jit
def _load_columns(x, order, columns, k):
    inside = columns < k
    if order is not None:
        columns = tl.load(order + columns, mask=inside, other=0)
    return tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scale_products_kernel(
    y,  # [m, n]
    sums,  # [m, n] int32
    row_scales,  # [m] float32
    feature_scales,  # [n] float32
    bias,  # [n] or None
    n,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (m, tiles of n)."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = features < n
    values = tl.load(sums + row * n + features, mask=inside, other=0).to(tl.float32)
    scales = tl.load(feature_scales + features, mask=inside, other=0.0)
    values = values * (scales * tl.load(row_scales + row))
    if bias is not None:
        values += tl.load(bias + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * n + features, values.to(y.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, matrix: PreparedMatrix) -> tuple[Tensor, Tensor]:
    """Rows in the 8-bit kind of the matrix that they are to be multiplied with.

    Args:
        x: [M, K] float32, bf16 or fp16, rows contiguous.
        matrix: Of K columns, of kind fp8 or int8.

    Returns:
        [M, K'] float8_e4m3fn or int8 codes in the order of the bytes of `matrix.data`, columns past
        K zero; [M, 1] float32, what a row's codes are to be multiplied with.
    """
    assert matrix.kind in LARGEST and x.ndim == 2 and x.shape[1] == matrix.shape[1]
    assert x.stride(1) == 1 and x.device == matrix.device and (x.is_cuda or INTERPRETED)
    m, width = x.shape[0], matrix.data.shape[1]
    codes = torch.empty((m, width), dtype=torch.int16, device=x.device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    if m > 0:
        quantize_rows_kernel[(m,)](
            codes,
            scales,
            x,
            matrix.order,
            x.shape[1],
            x.stride(0),
            width,
            FP8=matrix.kind == "fp8",
            LARGEST=LARGEST[matrix.kind],
            SMALLEST=_SMALLEST,
            LANES=matrix.lanes,
            TILE=_TILE,
            **pdl_options(x.device),
        )
    return codes.view(torch.float8_e4m3fn if matrix.kind == "fp8" else torch.int8), scales


def quantize_rows_reference(x: Tensor, matrix: PreparedMatrix) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in plain torch."""
    peak = x.float().abs().amax(1, keepdim=True).clamp_min(_SMALLEST)
    largest = LARGEST[matrix.kind]
    scaled = x.float() * (largest / peak)
    if matrix.order is not None:
        scaled = scaled[:, matrix.order.long()]
    scaled = torch.nn.functional.pad(scaled, (0, matrix.padded_columns - x.shape[1]))
    chunks = matrix.padded_columns // matrix.chunk
    scaled = scaled.view(-1, chunks, 2, matrix.lanes).transpose(2, 3).flatten(1)
    if matrix.kind == "fp8":
        return scaled.to(torch.float8_e4m3fn), peak / largest
    return (scaled + 0.5).floor().to(torch.int8), peak / largest


def scale_products(
    sums: Tensor, row_scales: Tensor, feature_scales: Tensor, bias: Tensor | None, y: Tensor
) -> Tensor:
    """y = sums * row_scales * feature_scales + bias.

    Args:
        sums: [M, N] int32, contiguous.
        row_scales: [M, 1] float32.
        feature_scales: [N] float32.
        bias: [N] of y's dtype, or None.
        y: [M, N], contiguous.

    Returns:
        `y`.
    """
    (m, n) = sums.shape
    assert sums.dtype == torch.int32 and sums.is_contiguous() and y.shape == (m, n)
    assert row_scales.shape == (m, 1) and feature_scales.shape == (n,) and y.is_contiguous()
    if y.numel() > 0:
        scale_products_kernel[(m, triton.cdiv(n, _TILE))](
            *(y, sums, row_scales, feature_scales, bias, n),
            TILE=_TILE,
            **pdl_options(y.device),
        )
    return y


def scale_products_reference(
    sums: Tensor, row_scales: Tensor, feature_scales: Tensor, bias: Tensor | None, y: Tensor
) -> Tensor:
    """`scale_products` in plain torch."""
    values = sums.float() * row_scales * feature_scales
    return y.copy_(values if bias is None else values + bias.float())
