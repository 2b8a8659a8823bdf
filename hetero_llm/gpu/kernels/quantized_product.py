"""Which product serves a quantized matrix at which number of rows.

| rows | product |
|---|---|
| up to `FEW_ROWS` | `quantized_linear`: weights as they are stored, rows in 16 bits |
| more, fp8 or int8 with a scale for each row | rows are quantized, too, with a scale each; the library multiplies in 8 bits (`torch._scaled_mm`, `torch._int_mm`) |
| more, all others | the matrix is dequantized into memory of that call, the library multiplies in 16 bits |

Float32 rows, and shapes that the kernels do not serve, are multiplied with the dequantized matrix
in their own type.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows, scale_products
from hetero_llm.gpu.kernels.quantized_gemm import (
    PreparedMatrix,
    prepare,
    prepares,
    quantized_linear,
    serves,
)
from hetero_llm.gpu.kernels.skinny_gemm import MAX_ROWS
from hetero_llm.models.layers import Product
from hetero_llm.quantization.matrix import QuantizedMatrix, quantized_product

FEW_ROWS = {"fp8": MAX_ROWS, "int8": MAX_ROWS, "int4": MAX_ROWS, "fp4": MAX_ROWS, "nf4": MAX_ROWS}
"""Rows up to which a kind's weights are multiplied as they are stored. An estimate: up to here a
product of the 8B shape is bound by its reads; measure with `bench.kernels.quantized_gemm`."""

_MIN_INT8_ROWS = 17  # of torch._int_mm
_ALIGNED = 16  # features and columns of library products in 8 bits


@dataclass(frozen=True, slots=True)
class QuantizedProduct:
    """The product of one matrix: a `models.layers.Product` that ignores the weight it is given.

    Attributes:
        matrix: in the order of the kernels; its tensors are all that this needs.
        quantize_rows: whether many rows may be quantized, too.
    """

    matrix: PreparedMatrix
    quantize_rows: bool = True

    def __call__(self, x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        return self._of_rows(rows, bias).view(*x.shape[:-1], self.matrix.shape[0])

    def _of_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        matrix = self.matrix
        if x.shape[0] <= FEW_ROWS[matrix.kind] and serves(x, matrix, bias):
            return quantized_linear(x, matrix, bias)
        if self.quantize_rows and multiplies_in_8_bits(x, matrix):
            return linear_in_8_bits(x, matrix, bias)
        weight = torch.empty(matrix.shape, dtype=x.dtype, device=x.device)
        return F.linear(x, dequantize_to(matrix, weight), bias)


def product_of(matrix: QuantizedMatrix, *, quantize_rows: bool = True) -> Product:
    """The product that takes the place of a `Linear`'s for a matrix on a GPU.

    It holds a copy of the matrix in the order of the kernels, so `matrix` is not needed any more
    (but where `prepares` says no: groups that are no multiple of 16 columns).

    Args:
        quantize_rows: Many rows may be quantized to 8 bits as the matrix is. False: rows keep their
            type at every number of rows, and a row's result differs less between numbers of rows.
    """
    if not prepares(matrix):
        return lambda x, _, bias: quantized_product(x, matrix, bias)
    return QuantizedProduct(prepare(matrix), quantize_rows)


def multiplies_in_8_bits(x: Tensor, matrix: PreparedMatrix) -> bool:
    """Whether `linear_in_8_bits` serves: one scale for each row of the matrix, and the library's
    conditions on devices, dtypes and sizes."""
    n, width = matrix.shape[0], matrix.padded_columns
    if matrix.group != 0 or n % _ALIGNED or width % _ALIGNED or x.stride(-1) != 1:
        return False
    if matrix.kind == "fp8":
        # Library products with a scale for each row write bfloat16 alone, from sm_90 on.
        return x.dtype == torch.bfloat16 and (not x.is_cuda or _has_fp8(x.device))
    return matrix.kind == "int8" and x.shape[0] >= _MIN_INT8_ROWS


def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def linear_in_8_bits(x: Tensor, matrix: PreparedMatrix, bias: Tensor | None) -> Tensor:
    """x @ matrix^T + bias, rows of x quantized as the matrix is, with a scale each.

    Args:
        x: [M, K]; `multiplies_in_8_bits` says yes to it.
        matrix: Of kind fp8 or int8, with a scale for each of its N rows.
        bias: [N] of x's dtype.

    Returns:
        [M, N] in x's dtype.
    """
    assert multiplies_in_8_bits(x, matrix) and matrix.row_scale is not None
    codes, scales = quantize_rows(x, matrix)
    if matrix.kind == "int8":
        sums = torch._int_mm(codes, matrix.data.view(torch.int8).t())
        y = torch.empty(sums.shape, dtype=x.dtype, device=x.device)
        return scale_products(sums, scales, matrix.row_scale, bias, y)
    # Fast accumulation is exact enough up to here: Hopper's tensor cores keep 14 bits of the sums.
    y = torch._scaled_mm(
        codes,
        matrix.data.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=matrix.row_scale.unsqueeze(0),
        out_dtype=x.dtype,
        use_fast_accum=matrix.shape[1] <= _FAST_SUMS,
    )
    return y if bias is None else y.add_(bias)


_FAST_SUMS = 8192  # columns up to which sums stay in the tensor cores' own precision
