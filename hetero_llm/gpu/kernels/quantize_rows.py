"""Activations in 8 bits, a scale for each row (token) or 128 of its columns, and the scales of
products of such rows.

- `quantize_rows_kernel` writes a row's codes in the order of a prepared matrix's codes, so that
  library products of both need no other order of the matrix. It may compute a gated activation
  first, so that its output is never in memory in 16 bits. A row stays in registers between its
  largest number and its codes.
- `store_quantized_row` does the same for kernels that own a row in the order of its columns.
- `scale_products_kernel` turns the int32 sums of an int8 product into outputs.

Wrappers `quantize_rows`, `quantize_gated` and `scale_products`, references `*_reference`; timed by
`bench.kernels.quantized_gemm` and `bench.kernels.elementwise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.activation import KINDS, activate, gated_activation_reference
from hetero_llm.gpu.kernels.launch import IN_INTERPRETER, INTERPRETED, pdl_options, wait_and_release
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a row, or of a group of its columns, becomes."""

_TILE = 1024  # lanes of one piece of a row
_SMALLEST = tl.constexpr(1e-30)  # a row of zeros has a scale, too
# In PTX, since ptxas 12.8 takes lanes apart wrongly that Triton's own conversion has put together.
_TWO_FP8 = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")
_FOUR_FP8 = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
)
_ROWS_OF_BLOCKS = 4  # the library's products with scales of groups want a multiple


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in the 8-bit kind of the matrix that they are to be multiplied with.

    Attributes:
        codes: [M', K'] float8_e4m3fn or int8, in the order of the bytes of `PreparedMatrix.data`,
            columns past K zero. M' is the number of rows M; where groups of columns have scales,
            the next multiple of 4, and rows past M hold anything.
        scales: what codes are to be multiplied with, float32: [M, 1], or [M', groups] of strides
            (1, M'), as the library wants them.
        num_rows: M.
        dtype: of the rows, and of their products.
    """

    codes: Tensor
    scales: Tensor
    num_rows: int
    dtype: torch.dtype

    @staticmethod
    def empty(num_rows: int, matrix: PreparedMatrix, dtype: torch.dtype) -> QuantizedRows:
        """Memory for rows of a matrix's K columns."""
        assert matrix.kind in LARGEST, matrix.kind
        of_kind = torch.float8_e4m3fn if matrix.kind == "fp8" else torch.int8
        device, padded = matrix.device, num_rows
        if matrix.group:
            padded = -(-num_rows // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS
            scales = torch.empty((matrix.groups, padded), device=device).t()
        else:
            scales = torch.empty((num_rows, 1), device=device)
        codes = torch.empty((padded, matrix.padded_columns), dtype=of_kind, device=device)
        return QuantizedRows(codes, scales, num_rows, dtype)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels write to: lanes of codes, scales, lanes of a row, stride of scales."""
        lanes = self.codes.view(torch.int16)
        return lanes, self.scales, lanes.shape[1], self.scales.stride(1)


def format_options(matrix: PreparedMatrix) -> dict[str, Any]:
    """Constants of kernels that write rows for this matrix."""
    return {
        "FP8": matrix.kind == "fp8",
        "LARGEST": LARGEST[matrix.kind],
        "LANES": matrix.lanes,
        "GROUP": matrix.group,
    }


@triton.jit
def _nearest_fp8(values):
    """What e4m3 can hold, ties to even: the interpreter's conversion gets carries wrong."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (values + 24576.0) - 24576.0  # 1.5 * 2^14: the last bit is 2^-9
    return tl.where(tl.abs(values) < 0.015625, subnormal, normal)


@triton.jit
def _codes(scaled, FP8: tl.constexpr):
    """Floats -> codes of 8 bits, the number nearest to each."""
    if FP8:
        if IN_INTERPRETER:
            return _nearest_fp8(scaled).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return tl.inline_asm_elementwise(
                _FOUR_FP8, "=r,f,f,f,f", [scaled], dtype=tl.uint8, is_pure=True, pack=4
            )
    else:
        nearest = tl.floor(tl.minimum(tl.maximum(scaled, -127.0), 127.0) + 0.5)
        return (nearest.to(tl.int32) & 255).to(tl.uint8)


@triton.jit
def _lanes(low, high, FP8: tl.constexpr):
    """Scaled floats -> int16 lanes of two codes."""
    if FP8 and not IN_INTERPRETER:
        return tl.inline_asm_elementwise(
            _TWO_FP8, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        return _join_codes(_codes(low, FP8), _codes(high, FP8))


@triton.jit
def _join_codes(low, high):
    return (low.to(tl.int32) | high.to(tl.int32) << 8).to(tl.int16)


@triton.jit
def store_quantized_row(
    values, codes, scales, width, scale_stride, row, k,
    PADDED: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Quantizes values [PADDED] float32, zeros from k on: the result of `quantize_rows_kernel`,
    bit by bit. PADDED holds a chunk and a group at least."""
    if GROUP == 0:
        peak = tl.maximum(tl.max(tl.abs(values), 0), _SMALLEST)
        tl.store(scales + row, peak / LARGEST)
        scaled = values * (LARGEST / peak)
    else:
        grouped = tl.reshape(values, (PADDED // GROUP, GROUP))
        peak = tl.maximum(tl.max(tl.abs(grouped), 1), _SMALLEST)
        groups = tl.arange(0, PADDED // GROUP)
        tl.store(scales + groups * scale_stride + row, peak / LARGEST, mask=groups * GROUP < k)
        scaled = grouped * (LARGEST / peak)[:, None]
    # Threads exchange codes here, or the row's 16-bit values before, as the compiler likes.
    chunks = tl.reshape(_codes(scaled, FP8), (PADDED // (2 * LANES), 2, LANES))
    low, high = tl.split(tl.permute(chunks, (0, 2, 1)))
    chunk, inner = tl.arange(0, PADDED // (2 * LANES)), tl.arange(0, LANES)
    lane = chunk[:, None] * LANES + inner[None, :]
    tl.store(codes + row * width + lane, _join_codes(low, high), mask=lane < width)


@triton.jit(do_not_specialize=["scale_stride"])  # with groups it is the number of rows
def quantize_rows_kernel(
    codes,  # [m, width] int16 lanes
    scales,  # [m] float32, or [groups] of stride scale_stride with the rows next to each other
    width,
    scale_stride,
    x,  # [m, k], rows x_stride apart; with a NAME [m, 2 k], gate first
    order,  # [k] int32, or None
    k,
    x_stride,
    NAME: tl.constexpr,  # of `activate`, or "": x is quantized as it is
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,  # lanes of a piece
    PDL: tl.constexpr,
):
    """A program per row. Lanes of a group follow each other."""
    GROUPS: tl.constexpr = TILE * 2 // GROUP if GROUP else 1  # of a piece
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * width
    lows, highs = (), ()
    peak = _SMALLEST
    for piece in tl.static_range(PIECES):
        lane = piece * TILE + tl.arange(0, TILE)
        first = lane // LANES * (2 * LANES) + lane % LANES
        low = _load_values(x, order, first, k, NAME)
        high = _load_values(x, order, first + LANES, k, NAME)
        largest = tl.maximum(tl.abs(low.to(tl.float32)), tl.abs(high.to(tl.float32)))
        if GROUP == 0:
            peak = tl.maximum(peak, tl.max(largest, 0))
            lows, highs = lows + (low,), highs + (high,)
        else:
            peaks = tl.max(tl.reshape(largest, (GROUPS, GROUP // 2)), 1)
            peaks = tl.maximum(peaks, _SMALLEST)
            group = piece * GROUPS + tl.arange(0, GROUPS)
            pointers = scales + group * scale_stride + row
            tl.store(pointers, peaks / LARGEST, mask=group * GROUP < k)
            inverse = (LARGEST / peaks)[:, None]
            inverse = tl.reshape(tl.broadcast_to(inverse, (GROUPS, GROUP // 2)), (TILE,))
            lanes = _lanes(low.to(tl.float32) * inverse, high.to(tl.float32) * inverse, FP8)
            tl.store(codes + lane, lanes, mask=lane < width)
    if GROUP == 0:
        tl.store(scales + row, peak / LARGEST)
        inverse = LARGEST / peak
        for piece in tl.static_range(PIECES):
            lane = piece * TILE + tl.arange(0, TILE)
            low, high = lows[piece].to(tl.float32), highs[piece].to(tl.float32)
            lanes = _lanes(low * inverse, high * inverse, FP8)
            tl.store(codes + lane, lanes, mask=lane < width)


@triton.jit
def _load_values(x, order, columns, k, NAME: tl.constexpr):
    """Zeros from k on."""
    inside = columns < k
    if order is not None:
        columns = tl.load(order + columns, mask=inside, other=0)
    values = tl.load(x + columns, mask=inside, other=0.0)
    if NAME != "":  # rounded where `gated_activation` rounds
        up = tl.load(x + k + columns, mask=inside, other=0.0).to(tl.float32)
        gate = activate(values.to(tl.float32), NAME).to(values.dtype)
        values = (gate.to(tl.float32) * up).to(values.dtype)
    return values


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
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = features < n
    values = tl.load(sums + row * n + features, mask=inside, other=0).to(tl.float32)
    scales = tl.load(feature_scales + features, mask=inside, other=0.0)
    values = values * (scales * tl.load(row_scales + row))
    if bias is not None:
        values += tl.load(bias + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * n + features, values.to(y.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, matrix: PreparedMatrix) -> QuantizedRows:
    """Rows in the 8-bit kind of the matrix that they are to be multiplied with.

    Args:
        x: [M, K] float32, bf16 or fp16, rows contiguous.
        matrix: Of K columns, of kind fp8 or int8; groups of columns are whole chunks or there are
            none.
    """
    return _quantize_rows(x, matrix, "")


def quantize_gated(gate_up: Tensor, name: str, matrix: PreparedMatrix) -> QuantizedRows:
    """`quantize_rows` of `gated_activation(gate_up, name)`, bit by bit.

    Args:
        gate_up: [M, 2 * K], gate first; float32, bf16 or fp16; rows contiguous.
        name: One of `layers.Activation` that config.json can name.
        matrix: As of `quantize_rows`.
    """
    return _quantize_rows(gate_up, matrix, KINDS[name])


def _quantize_rows(x: Tensor, matrix: PreparedMatrix, kind: str) -> QuantizedRows:
    m, k = x.shape[0], matrix.shape[1]
    assert x.ndim == 2 and x.shape[1] == (2 * k if kind else k), (x.shape, k)
    assert x.stride(1) == 1 and x.device == matrix.device and (x.is_cuda or INTERPRETED)
    assert matrix.group % matrix.chunk == 0, (matrix.group, matrix.chunk)
    assert matrix.group == 0 or matrix.order is None, "groups of columns in another order"
    rows = QuantizedRows.empty(m, matrix, x.dtype)
    codes, scales, width, scale_stride = rows.arguments
    tile = min(_TILE, max(triton.next_power_of_2(width), matrix.group // 2))
    if m > 0:
        quantize_rows_kernel[(m,)](
            *(codes, scales, width, scale_stride, x, matrix.order, k, x.stride(0)),
            NAME=kind,
            **format_options(matrix),
            PIECES=triton.cdiv(width, tile),
            TILE=tile,
            num_warps=max(1, tile // 256),
            **pdl_options(x.device),
        )
    return rows


def quantize_rows_reference(x: Tensor, matrix: PreparedMatrix) -> QuantizedRows:
    """`quantize_rows` in plain torch."""
    rows = QuantizedRows.empty(x.shape[0], matrix, x.dtype)
    m, k, group = x.shape[0], x.shape[1], matrix.group or x.shape[1]
    peaks = (
        torch.nn.functional.pad(x.float().abs(), (0, -k % group)).unflatten(1, (-1, group)).amax(2)
    )
    peaks = peaks.clamp_min(_SMALLEST.value)
    largest = LARGEST[matrix.kind]
    rows.scales[:m] = peaks / largest
    scaled = x.float() * (largest / peaks).repeat_interleave(group, 1)[:, :k]
    if matrix.order is not None:
        scaled = scaled[:, matrix.order.long()]
    scaled = torch.nn.functional.pad(scaled, (0, matrix.padded_columns - k))
    chunks = matrix.padded_columns // matrix.chunk
    scaled = scaled.view(m, chunks, 2, matrix.lanes).transpose(2, 3).flatten(1)
    rows.codes[:m] = (scaled if matrix.kind == "fp8" else (scaled + 0.5).floor()).to(
        rows.codes.dtype
    )
    return rows


def quantize_gated_reference(gate_up: Tensor, name: str, matrix: PreparedMatrix) -> QuantizedRows:
    """`quantize_gated` in plain torch."""
    return quantize_rows_reference(gated_activation_reference(gate_up, name), matrix)


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
