"""A quantized matrix written out as plain numbers, for products of many rows by the library.

Wrapper `dequantize_to`, reference `quantization.matrix.dequantize`; timed by
`bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import IN_INTERPRETER, INTERPRETED, pdl_options, wait_and_release
from hetero_llm.gpu.kernels.quantized_elements import INT4, parts, plain_part
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, of_slot, zero_of_slot
from hetero_llm.quantization.matrix import INT4_ZERO

_BLOCK_N = 32
_INT4_ZERO = tl.constexpr(INT4_ZERO)


@triton.jit
def _load_words(pointer, word, features, n, stride, ROWS: tl.constexpr):
    """[features, 1] of one row of words of scales, zero points or offsets."""
    pointers = pointer + word * stride + features // ROWS
    return tl.load(pointers, mask=features < n, other=0)[:, None]


@triton.jit
def dequantize_kernel(
    out,  # [n, k]
    data,  # [n, width] int16 lanes
    scale,  # the rest as in `PreparedMatrix`
    zero,
    offset,
    row_scale,
    order,  # [n / order_rows, k]
    n,
    k,
    width,
    order_rows,
    scale_stride,
    zero_stride,
    FORM: tl.constexpr,  # quantized_gemm.MatrixForm
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N, chunks); float32 results are computed without the rounding of nf4."""
    KIND: tl.constexpr = FORM.kind
    LANES: tl.constexpr = FORM.lanes
    GROUP: tl.constexpr = FORM.group
    ROWS: tl.constexpr = FORM.rows
    SCALE: tl.constexpr = FORM.scale
    PARTS: tl.constexpr = FORM.parts
    TOGETHER: tl.constexpr = FORM.together
    GROUPS: tl.constexpr = FORM.groups
    PER_WORD: tl.constexpr = FORM.per_word
    DTYPE: tl.constexpr = out.dtype.element_ty
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, LANES)
    pointers = data + features.to(tl.int64)[:, None] * width + tl.program_id(1) * LANES
    lanes = tl.load(pointers + inner[None, :], mask=(features < n)[:, None], other=0)
    # The product before this one reads what is written here.
    wait_and_release(PDL)
    if tl.float32 != DTYPE and not IN_INTERPRETER:
        values = parts(lanes, KIND, DTYPE)
    for part in tl.static_range(PARTS):
        if tl.float32 != DTYPE and not IN_INTERPRETER:
            value = values[part].to(tl.float32)
        else:
            value = plain_part(lanes, part, KIND, DTYPE)
        columns = (tl.program_id(1) * PARTS + part) * LANES + inner
        # Groups past the last one are of columns past the last one.
        group = (
            tl.minimum((tl.program_id(1) * PARTS + part) * LANES, k - 1) // GROUP if GROUP else 0
        )
        if KIND == INT4:
            value -= 1024.0 if tl.float16 == DTYPE else 128.0
            if zero is not None:
                words = _load_words(zero, group // GROUPS, features, n, zero_stride, 1)
                value -= zero_of_slot(words, part // TOGETHER, GROUPS)
            elif offset is None:
                value -= _INT4_ZERO
        if GROUP > 0:
            words = _load_words(scale, group // PER_WORD, features, n, scale_stride, ROWS)
            value *= of_slot(words, group % PER_WORD, SCALE)
        if offset is not None:
            words = _load_words(offset, group // PER_WORD, features, n, zero_stride, 1)
            value += of_slot(words, group % PER_WORD, SCALE)
        if row_scale is not None:
            value *= tl.load(row_scale + features, mask=features < n, other=0.0)[:, None]
        inside = (features < n)[:, None] & (columns < k)[None, :]
        columns = columns[None, :]
        if order is not None:
            orders = order + features[:, None] // order_rows * k
            columns = tl.load(orders + columns, mask=inside, other=0)
        places = out + features.to(tl.int64)[:, None] * k + columns
        tl.store(places, value.to(DTYPE), mask=inside)


def dequantize_to(matrix: PreparedMatrix, out: Tensor) -> Tensor:
    """Writes the matrix to `out`, computed in float32 and rounded once (nf4 in 16 bits: twice).

    Args:
        matrix: Of N rows and K columns.
        out: [N, K], contiguous; float32, bf16 or fp16.

    Returns:
        `out`, columns in the matrix's order.
    """
    n, k = matrix.shape
    assert out.shape == (n, k) and out.is_contiguous() and out.device == matrix.device
    assert out.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert out.is_cuda or INTERPRETED, "no device for this kernel"
    if out.numel() == 0:
        return out
    dequantize_kernel[(triton.cdiv(n, _BLOCK_N), matrix.data.shape[1] // matrix.lanes)](
        out,
        matrix.data,
        *matrix.tensors,
        n,
        k,
        matrix.data.shape[1],
        n if matrix.order is None else n * k // matrix.order.numel(),
        *matrix.strides,
        FORM=matrix.form,
        BLOCK_N=_BLOCK_N,
        **pdl_options(out.device),
    )
    return out
