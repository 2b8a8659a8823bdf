"""Which product serves a quantized matrix at which number of rows.

| rows | product |
|---|---|
| up to `few_rows` | `quantized_linear`: weights as they are stored, rows in 16 bits |
| those in `fp8_rows`, fp8 with a scale for each row | `fp8_linear`: rows become fp8, in two parts that add up to the row in 16 bits up to `TWO_PARTS` rows, else rounded |
| more, fp8 or int8 with a scale for each row | rows are quantized, too, with a scale each; the library multiplies in 8 bits (`torch._scaled_mm`, `torch._int_mm`) |
| more, fp8 with a scale for each 128 x 128 | the same with a scale for each 128 columns of a row, where `find_block_product` has found that the library can |
| more, all others | the matrix is dequantized into memory of that call, the library multiplies in 16 bits |

`few_rows`, `fp8_rows`, and whether the library multiplies in 8 bits, are measured when a model is
loaded (`gpu.switch_points`). Float32 rows, and shapes that the kernels do not serve, are multiplied with
the dequantized matrix in their own type.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.gpu.kernels import fp8_gemm
from hetero_llm.gpu.kernels.block_product import BlockProduct, block_scales, has_blocks
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows, scale_products
from hetero_llm.gpu.kernels.quantized_gemm import (
    MAX_ROWS,
    PreparedMatrix,
    prepare,
    prepares,
    quantized_linear,
    serves,
)
from hetero_llm.models.layers import Product
from hetero_llm.quantization.matrix import QuantizedMatrix, quantized_product

FEW_ROWS = 64
"""Rows up to which weights are multiplied as they are stored, unless measurements say otherwise: up
to here a product of the 8B shape is bound by its reads, by estimate."""

TWO_PARTS = 64
"""Rows up to which `fp8_linear` gets them in two parts: beyond, the tensor cores would be the limit
and not the reads."""

_MIN_INT8_ROWS = 17  # of torch._int_mm
_ALIGNED = 16  # features and columns of library products in 8 bits


@dataclass(eq=False, slots=True)
class QuantizedProduct:
    """The product of one matrix: a `models.layers.Product` that ignores the weight it is given.
    A norm or gate whose output this product alone reads may hand over `QuantizedRows`.

    Attributes:
        matrix: in the order of the kernels; its tensors are all that this needs.
        block_product: multiplies many rows if the matrix has blocks; None: they are dequantized.
        few_rows: rows up to which weights are multiplied as they are stored.
        in_8_bits: whether more rows may be quantized, too.
        fp8_rows: numbers of rows of which `fp8_linear` makes the product, before all others.
        comes_quantized: a norm or gate hands over `QuantizedRows` where `quantizes` says so.
    """

    matrix: PreparedMatrix
    block_product: BlockProduct | None = None
    few_rows: int = FEW_ROWS
    in_8_bits: bool = True
    fp8_rows: range = range(0)
    comes_quantized: bool = False
    _block_scales: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.block_product is not None and has_blocks(self.matrix):
            self._block_scales = block_scales(self.matrix)

    def __call__(self, x: Tensor | QuantizedRows, weight: object, bias: Tensor | None) -> Tensor:
        """[..., K] -> [..., N]."""
        if isinstance(x, QuantizedRows):
            fp8 = x.parts == 2 or x.num_rows in self.fp8_rows
            return self.by_fp8(x, bias) if fp8 else self.by_library(x, bias)
        rows = x.reshape(-1, x.shape[-1])
        if self._is_fp8(rows):
            y = self.by_fp8(quantize_rows(rows, self.matrix, parts=self.parts(rows)), bias)
            return y.view(*x.shape[:-1], self.matrix.shape[0])
        few = rows.shape[0] <= self.few_rows and serves(rows[:MAX_ROWS], self.matrix, bias)
        if few:
            y = self.of_few_rows(rows, bias)
        else:
            y = self.of_many_rows(rows, bias, in_8_bits=self.in_8_bits)
        return y.view(*x.shape[:-1], self.matrix.shape[0])

    def quantizes(self, x: Tensor) -> bool:
        """Whether a product of as many rows as x has, of its type and device, quantizes them: then
        they may come as `QuantizedRows`. x: [M, anything]."""
        if self._is_fp8(x):
            return True
        return x.shape[0] > self.few_rows and self.in_8_bits and self.can_quantize(x)

    def parts(self, x: Tensor) -> int:
        """In how many parts `QuantizedRows` of as many rows as x has are to come."""
        return parts_of(x.shape[0]) if self._is_fp8(x) else 1

    def can_be_fp8(self, x: Tensor) -> bool:
        """Whether `fp8_linear` can make the product of as many rows of this type and device."""
        return (
            0 < x.shape[0] <= fp8_gemm.MAX_ROWS
            and (parts_of(x.shape[0]) == 2 or self.in_8_bits)
            and fp8_gemm.serves(self.matrix)
            and x.dtype == torch.bfloat16
            and x.stride(-1) == 1
            and (INTERPRETED or (x.is_cuda and _has_fp8(x.device)))
        )

    def _is_fp8(self, x: Tensor) -> bool:
        return x.shape[0] in self.fp8_rows and self.can_be_fp8(x)

    def by_fp8(self, rows: QuantizedRows, bias: Tensor | None) -> Tensor:
        """[M, K] -> [M, N] by `fp8_linear`."""
        return fp8_gemm.fp8_linear(rows, self.matrix, bias)

    def can_quantize(self, x: Tensor) -> bool:
        """Whether there is a library product in 8 bits for as many rows of this type."""
        if self.matrix.group and self._block_scales is None:
            return False
        return multiplies_in_8_bits(x, self.matrix)

    def of_few_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[M, K] -> [M, N] by the kernels of few rows, which read the weights once for each
        `MAX_ROWS` rows; `quantized_gemm.serves` says yes to those."""
        y = torch.empty((x.shape[0], self.matrix.shape[0]), dtype=x.dtype, device=x.device)
        for part, out in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
            quantized_linear(part, self.matrix, bias, out=out)
        return y

    def of_many_rows(self, x: Tensor, bias: Tensor | None, *, in_8_bits: bool) -> Tensor:
        """[M, K] -> [M, N] by the library, in 8 bits only where it can."""
        if in_8_bits and self.can_quantize(x):
            return self.by_library(quantize_rows(x, self.matrix), bias)
        weight = torch.empty(self.matrix.shape, dtype=x.dtype, device=x.device)
        return F.linear(x, dequantize_to(self.matrix, weight), bias)

    def by_library(self, rows: QuantizedRows, bias: Tensor | None) -> Tensor:
        """[M, K] -> [M, N] by the library in 8 bits, for rows that `can_quantize` says yes to."""
        if self._block_scales is None:
            return multiply_in_8_bits(rows, self.matrix, bias)
        assert self.block_product is not None
        y = self.block_product(rows, self.matrix, self._block_scales)[: rows.num_rows]
        return y if bias is None else y.add_(bias)


def parts_of(num_rows: int) -> int:
    """In how many parts as many rows go to `fp8_linear`."""
    return 2 if num_rows <= TWO_PARTS else 1


def product_of(
    matrix: QuantizedMatrix,
    *,
    block_product: BlockProduct | None = None,
    in_8_bits: bool = True,
) -> Product:
    """The product that takes the place of a `Linear`'s for a matrix on a GPU.

    It holds a copy of the matrix in the order of the kernels, so `matrix` is not needed any more
    (but where `prepares` says no: groups that are no multiple of 16 columns).

    Args:
        block_product: See `QuantizedProduct`.
        in_8_bits: Many rows may be quantized to 8 bits as the matrix is. False: rows keep their
            type at every number of rows, and a row's result differs less between numbers of rows.
    """
    if not prepares(matrix):
        return lambda x, _, bias: quantized_product(x, matrix, bias)
    return QuantizedProduct(prepare(matrix), block_product, in_8_bits=in_8_bits)


def multiplies_in_8_bits(x: Tensor, matrix: PreparedMatrix) -> bool:
    """Whether the library has a product in 8 bits of as many rows as x has: one scale for each row
    of the matrix, or blocks, and the library's conditions on devices, dtypes and sizes."""
    n, width = matrix.shape[0], matrix.padded_columns
    if n % _ALIGNED or width % _ALIGNED or x.stride(-1) != 1:
        return False
    if matrix.group != 0 and not has_blocks(matrix):
        return False
    if matrix.kind == "fp8":
        # Library products with a scale for each row write bfloat16 alone, from sm_90 on.
        return x.dtype == torch.bfloat16 and (not x.is_cuda or _has_fp8(x.device))
    halves = (torch.bfloat16, torch.float16)
    return matrix.kind == "int8" and x.shape[0] >= _MIN_INT8_ROWS and x.dtype in halves


def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def multiply_in_8_bits(rows: QuantizedRows, matrix: PreparedMatrix, bias: Tensor | None) -> Tensor:
    """rows @ matrix^T + bias.

    Args:
        rows: [M, K]; `multiplies_in_8_bits` says yes to what they were made of.
        matrix: Of kind fp8 or int8, with a scale for each of its N rows.
        bias: [N] of the rows' dtype.

    Returns:
        [M, N] in the rows' dtype.
    """
    assert matrix.row_scale is not None and matrix.group == 0
    if matrix.kind == "int8":
        sums = torch._int_mm(rows.codes, matrix.data.view(torch.int8).t())
        y = torch.empty(sums.shape, dtype=rows.dtype, device=sums.device)
        return scale_products(sums, rows.scales, matrix.row_scale, bias, y)
    # Fast accumulation is exact enough up to here: Hopper's tensor cores keep 14 bits of the sums.
    y = torch._scaled_mm(
        rows.codes,
        matrix.data.view(torch.float8_e4m3fn).t(),
        scale_a=rows.scales,
        scale_b=matrix.row_scale.unsqueeze(0),
        out_dtype=rows.dtype,
        use_fast_accum=matrix.shape[1] <= _FAST_SUMS,
    )
    return y if bias is None else y.add_(bias)


_FAST_SUMS = 8192  # columns up to which sums stay in the tensor cores' own precision
