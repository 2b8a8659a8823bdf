"""Products of fp8 rows with an fp8 matrix of 128 x 128 blocks, by the library.

cuBLASLt 12.9 and later have them on Hopper ("128-element 1D and 128x128 2D block scaling", cuBLAS
documentation), `torch.nn.functional.scaled_mm` from torch 2.10 on. Rows have a scale for each 128
columns, laid out as in `QuantizedRows`; their number is a multiple of 4. The matrix's scales are
[groups of columns, blocks of rows], the former next to each other and padded to a multiple of 4.

`find_block_product` tries the library's product on random data before anything is multiplied with
it. Reference `multiply_blocks_reference`; timed by `bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows_reference
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS, QuantizedMatrix

logger = logging.getLogger(__name__)

BlockProduct = Callable[[QuantizedRows, PreparedMatrix, Tensor], Tensor]
"""(rows [M, K], matrix [N, K], its `block_scales`) -> [M', N] in the rows' dtype."""

_BLOCK = 128  # columns of a scale
_PADDED = 4  # scales of columns are padded to a multiple
_WORST_ERROR = 4e-3  # of bfloat16 results, over their norm: rounding alone makes 1.7e-3


def has_blocks(matrix: PreparedMatrix) -> bool:
    """Whether the library's product with blocks takes a matrix of this kind."""
    return (
        matrix.kind == "fp8"
        and (matrix.rows, matrix.group) == (BLOCK_ROWS, _BLOCK)
        and _BLOCK % matrix.chunk == 0
        and matrix.padded_columns == matrix.shape[1]
        and matrix.row_scale is None
        and matrix.order is None
    )


def block_scales(matrix: PreparedMatrix) -> Tensor:
    """The matrix's scales as the library wants them: [groups', blocks of rows] float32 of strides
    (1, groups'), groups' a multiple of 4; what is past the last group is 0."""
    assert has_blocks(matrix) and matrix.scale is not None
    scales = matrix.scale.t().contiguous().view(matrix.scale_dtype)
    scales = scales[: -(-matrix.shape[0] // BLOCK_ROWS), : matrix.groups].float()
    return F.pad(scales, (0, -matrix.groups % _PADDED)).t()


def multiply_blocks(rows: QuantizedRows, matrix: PreparedMatrix, scales: Tensor) -> Tensor:
    """A `BlockProduct` of the library's."""
    return F.scaled_mm(
        rows.codes,
        matrix.data.view(torch.float8_e4m3fn).t(),
        rows.scales,
        F.ScalingType.BlockWise1x128,
        scales,
        F.ScalingType.BlockWise128x128,
        output_dtype=rows.dtype,
    )


def multiply_blocks_reference(
    rows: QuantizedRows, matrix: PreparedMatrix, scales: Tensor
) -> Tensor:
    """`multiply_blocks` in plain torch, with float64 sums."""
    n, k = matrix.shape

    def spread(values: Tensor, dim: int, size: int) -> Tensor:
        return values.double().repeat_interleave(_BLOCK, dim).narrow(dim, 0, size)

    left = rows.codes.double() * spread(rows.scales, 1, k)
    weight = matrix.data.view(torch.float8_e4m3fn).double()
    weight = weight * spread(spread(scales.t(), 1, k), 0, n)
    return (left @ weight.t()).to(rows.dtype)


@functools.cache
def find_block_product(
    device: torch.device, candidate: BlockProduct = multiply_blocks
) -> BlockProduct | None:
    """`candidate` if it computes what the reference does on random data, else None, and a line in
    the log says why. Odd numbers of groups and rows are tried, too, where layouts differ."""
    reason = None
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((66, 256, 640), (384, 400, 1024)):
        data = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        scale = 0.5 + torch.rand(-(-n // BLOCK_ROWS), k // _BLOCK, generator=generator)
        matrix = prepare(QuantizedMatrix("fp8", data, scale, _BLOCK, BLOCK_ROWS).to(device))
        sizes = torch.rand(m, k // _BLOCK, generator=generator).repeat_interleave(_BLOCK, 1)
        x = torch.randn(m, k, generator=generator) * sizes
        rows = quantize_rows_reference(x.to(device, torch.bfloat16), matrix)
        scales = block_scales(matrix)
        try:
            y = candidate(rows, matrix, scales)[:m].double()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            break
        expected = multiply_blocks_reference(rows, matrix, scales)[:m].double()
        error_of_y = ((y - expected).norm() / expected.norm()).item()
        if not error_of_y < _WORST_ERROR:
            reason = f"an error of {error_of_y:.2g} on random data"
            break
    if reason is None:
        return candidate
    logger.warning(
        "the library's fp8 products with 128 x 128 blocks are not used (%s): such weights are "
        "dequantized for products of many rows",
        reason,
    )
    return None
