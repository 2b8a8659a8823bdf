"""Residual add and norm in one kernel, one program a row: RMS norm, Gemma's, layer norm. The first
two may write rows in 8 bits for the product that follows. RMS norms of the queries and of the keys
of a fused projection, in place.

The references are the functions of `models.layers`; timed by `bench.kernels.elementwise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import pdl_options, wait_and_release
from hetero_llm.gpu.kernels.quantize_rows import (
    QuantizedRows,
    format_options,
    store_quantized_row,
)
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix
from hetero_llm.models import layers
from hetero_llm.models.layers import Affine

MAX_NORM_SIZE = 16384
"""Longest row: a program holds its whole row in registers."""

add_rms_norm_reference = layers.add_rms_norm
add_gemma_rms_norm_reference = layers.add_gemma_rms_norm
add_layer_norm_reference = layers.add_layer_norm
norm_projections_reference = layers.norm_projections


@triton.jit
def _add(x_ptr, residual_ptr, extra_ptr, place, inside, HAS_RESIDUAL: tl.constexpr):
    """The row's sum in float32, rounded to the inputs' type after each addition and stored for the
    next residual."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if extra_ptr is not None:
        extra = tl.load(extra_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total = (total + extra).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = (total + residual).to(dtype)
        tl.store(residual_ptr + place, rounded, mask=inside)
        total = rounded.to(tl.float32)
    return total


@triton.jit
def rms_norm_row(total, weight, eps, SIZE: tl.constexpr, GEMMA: tl.constexpr, DTYPE: tl.constexpr):
    """The norm of a row, times its weight, rounded to DTYPE. `total`, `weight`: float32, zeros
    behind SIZE."""
    mean_square = tl.sum(total * total, 0) / SIZE
    norm = total * tl.rsqrt(mean_square + eps)
    if GEMMA:
        weight = 1.0 + weight
    else:  # rounded before the product with the weight; in float32 this changes nothing
        norm = norm.to(DTYPE).to(tl.float32)
    return (norm * weight).to(DTYPE)


@triton.jit
def _normed_row(
    x_ptr, residual_ptr, weight_ptr, eps, columns,
    SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This program's row, rounded to the inputs' type; the sum is stored."""
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_and_release(PDL)

    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = _add(x_ptr, residual_ptr, None, place, inside, HAS_RESIDUAL)
    return rms_norm_row(total, weight, eps, SIZE, GEMMA, x_ptr.dtype.element_ty)


@triton.jit
def _add_rms_norm(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GEMMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    row = _normed_row(x_ptr, residual_ptr, weight_ptr, eps, columns, SIZE, HAS_RESIDUAL, GEMMA, PDL)
    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    tl.store(out_ptr + place, row, mask=columns < SIZE)


@triton.jit(do_not_specialize=["scale_stride"])  # with groups it is the number of rows
def _quantized_rms_norm(
    codes_ptr, scales_ptr, width, scale_stride, x_ptr, residual_ptr, weight_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GEMMA: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    row = _normed_row(x_ptr, residual_ptr, weight_ptr, eps, columns, SIZE, HAS_RESIDUAL, GEMMA, PDL)
    store_quantized_row(
        *(row.to(tl.float32), codes_ptr, scales_ptr, width, scale_stride),
        *(tl.program_id(0).to(tl.int64), SIZE, PADDED, FP8, LARGEST, LANES, GROUP),
    )


@triton.jit
def _norm_part(
    qkv_ptr, weight_ptr, place, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr
):
    """Norms qkv[place : place + SIZE] in place."""
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_and_release(PDL)
    values = tl.load(qkv_ptr + place + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    norm = ((values * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    tl.store(qkv_ptr + place + columns, norm, mask=inside)


@triton.jit
def _norm_projections(
    qkv_ptr, q_weight_ptr, k_weight_ptr, row_stride, eps,
    QUERIES: tl.constexpr, QUERIES_PADDED: tl.constexpr,
    KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 2): queries, keys."""
    row = tl.program_id(0).to(tl.int64) * row_stride
    if tl.program_id(1) == 0:
        _norm_part(qkv_ptr, q_weight_ptr, row, eps, QUERIES, QUERIES_PADDED, PDL)
    else:
        _norm_part(qkv_ptr, k_weight_ptr, row + QUERIES, eps, KEYS, KEYS_PADDED, PDL)


@triton.jit
def _parameter(pointer, columns, inside, default: tl.constexpr, PADDED: tl.constexpr):
    """A weight or bias in its stored type, which takes fewer registers; `default` if missing."""
    if pointer is None:
        return tl.full((PADDED,), default, tl.float32)
    else:
        return tl.load(pointer + columns, mask=inside, other=0.0)


@triton.jit
def _add_layer_norm(
    out_ptr, second_out_ptr, x_ptr, residual_ptr, extra_ptr,
    weight_ptr, bias_ptr, second_weight_ptr, second_bias_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    weight = _parameter(weight_ptr, columns, inside, 1.0, PADDED)
    bias = _parameter(bias_ptr, columns, inside, 0.0, PADDED)
    if second_out_ptr is not None:
        second_weight = _parameter(second_weight_ptr, columns, inside, 1.0, PADDED)
        second_bias = _parameter(second_bias_ptr, columns, inside, 0.0, PADDED)
    wait_and_release(PDL)

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = _add(x_ptr, residual_ptr, extra_ptr, place, inside, HAS_RESIDUAL)
    centred = tl.where(inside, total - tl.sum(total, 0) / SIZE, 0.0)
    variance = tl.sum(centred * centred, 0) / SIZE
    norm = centred * tl.rsqrt(variance + eps)
    out = norm * weight.to(tl.float32) + bias.to(tl.float32)
    tl.store(out_ptr + place, out.to(dtype), mask=inside)
    if second_out_ptr is not None:
        out = norm * second_weight.to(tl.float32) + second_bias.to(tl.float32)
        tl.store(second_out_ptr + place, out.to(dtype), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual`, and that sum; an `AddNorm` of `models/layers.py`.

    Computed in float32 and rounded where the torch path rounds: the sum, the norm, the product.

    Args:
        x: [T, size], contiguous; float32, bfloat16 or float16; size at most `MAX_NORM_SIZE`.
        residual: As x, overwritten with the sum; None: the sum is x itself.
        weight: [size], dtype of x.
        eps: Added to the mean of squares.

    Returns:
        The norm (new) and the sum (`residual`, or x), both [T, size].
    """
    return _rms_norm(x, residual, weight, eps, gemma=False)


def add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual` times 1 + weight, and that sum: see `layers.GemmaRMSNorm`.

    Arguments and result as of `add_rms_norm`; rounded where the torch path rounds, after the sum
    and after the product.
    """
    return _rms_norm(x, residual, weight, eps, gemma=True)


def norm_projections(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `layers.norm_projections`; rounded where the torch path rounds.

    Args:
        qkv: [T, queries + 2 * keys], rows contiguous; float32, bfloat16 or float16; overwritten.
        q_weight, k_weight: [queries] and [keys], `MAX_NORM_SIZE` at most, dtype of qkv.
        eps: Added to the mean of squares.

    Returns:
        `qkv`.
    """
    queries, keys = len(q_weight), len(k_weight)
    assert qkv.shape[1] == queries + 2 * keys and qkv.stride(1) == 1, (qkv.shape, qkv.stride())
    assert q_weight.dtype == k_weight.dtype == qkv.dtype and max(queries, keys) <= MAX_NORM_SIZE
    if len(qkv):
        padded = triton.next_power_of_2(queries)
        _norm_projections[(len(qkv), 2)](
            *(qkv, q_weight, k_weight, qkv.stride(0), eps),
            QUERIES=queries,
            QUERIES_PADDED=padded,
            KEYS=keys,
            KEYS_PADDED=triton.next_power_of_2(keys),
            num_warps=num_warps(padded),
            **pdl_options(qkv.device),
        )
    return qkv


def _rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, residual, weight)
    total = x if residual is None else residual
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out, total
    _add_rms_norm[(x.numel() // x.shape[-1],)](
        *(out, x, total, weight, eps), **_row_options(x, residual), GEMMA=gemma
    )
    return out, total


def quantized_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    matrix: PreparedMatrix,
    gemma: bool,
) -> tuple[QuantizedRows, torch.Tensor]:
    """`quantize_rows` of the norm of `add_rms_norm` or `add_gemma_rms_norm`, bit by bit, and the
    sum.

    Args:
        x: [T, size], and the others as there.
        matrix: That the norm will be multiplied with; see `quantizes_norms`.
    """
    _check(x, residual, weight)
    assert quantizes_norms(matrix) and x.shape[1] == matrix.shape[1]
    total = x if residual is None else residual
    rows = QuantizedRows.empty(len(x), matrix, x.dtype)
    if x.numel() > 0:
        _quantized_rms_norm[(len(x),)](
            *(*rows.arguments, x, total, weight, eps),
            **_row_options(x, residual),
            **format_options(matrix),
            GEMMA=gemma,
        )
    return rows, total


def quantizes_norms(matrix: PreparedMatrix) -> bool:
    """Whether `quantized_rms_norm` serves: a row of the kernel holds whole chunks and groups, in
    their order."""
    padded = triton.next_power_of_2(matrix.shape[1])
    return (
        matrix.order is None
        and matrix.group % matrix.chunk == 0
        and max(matrix.chunk, matrix.group) <= padded <= MAX_NORM_SIZE
    )


def _row_options(x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
    """Constants and launch options of a norm with one program a row."""
    padded = triton.next_power_of_2(x.shape[-1])
    return {
        "SIZE": x.shape[-1],
        "PADDED": padded,
        "HAS_RESIDUAL": residual is not None,
        "num_warps": num_warps(padded),
        **pdl_options(x.device),
    }


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    extra: torch.Tensor | None,
    affines: Sequence[Affine],
    eps: float,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One or two layer norms of `x + extra + residual`, and that sum: see `layers.AddLayerNorm`.

    Computed in float32; each of the two additions and the results are rounded.

    Args:
        x: [T, size], contiguous; float32, bfloat16 or float16; size at most `MAX_NORM_SIZE`.
        residual: As x, overwritten with the sum; None: the sum is x itself.
        extra: As x, or None; only with a residual.
        affines: One or two of weight and bias, [size] and of x's dtype, None: one and zero.
        eps: Added to the variance.

    Returns:
        A norm (new) for each of `affines` and the sum (`residual`, or x), all [T, size].
    """
    assert len(affines) in (1, 2), len(affines)
    assert extra is None or residual is not None
    _check(x, residual, *(parameter for affine in affines for parameter in affine), extra=extra)
    total = x if residual is None else residual
    outs = [torch.empty_like(x) for _ in affines]
    if x.numel() == 0:
        return outs, total
    second_out, second = (outs[1], affines[1]) if len(affines) == 2 else (None, (None, None))
    _add_layer_norm[(x.numel() // x.shape[-1],)](
        *(outs[0], second_out, x, total, extra, *affines[0], *second, eps),
        **_row_options(x, residual),
    )
    return outs, total


def num_warps(padded: int) -> int:
    """16 elements a thread: two 16-byte loads of each operand in flight."""
    return min(max(padded // 512, 1), 32)


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *parameters: torch.Tensor | None,
    extra: torch.Tensor | None = None,
) -> None:
    size = x.shape[-1]
    assert x.is_contiguous() and size <= MAX_NORM_SIZE, (x.shape, x.stride())
    for parameter in parameters:
        if parameter is not None:
            assert parameter.shape == (size,) and parameter.dtype == x.dtype, parameter.shape
            assert parameter.is_contiguous(), parameter.stride()
    for addend in (residual, extra):
        if addend is not None:
            assert addend.shape == x.shape and addend.dtype == x.dtype, (addend.shape, addend.dtype)
            assert addend.is_contiguous(), addend.stride()
