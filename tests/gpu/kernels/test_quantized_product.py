"""The product that a model is given: right at every number of rows and for every shape."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels import quantized_product as op
from hetero_llm.gpu.kernels.block_product import multiply_blocks_reference
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import MAX_ROWS, prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS, KINDS, QuantizedMatrix, dequantize
from tests.quantization.matrices import random_matrix


def error_of(device, x: torch.Tensor, matrix: QuantizedMatrix, **settings: bool) -> float:
    """Of the product of `matrix` with a bias, over its size."""
    matrix = matrix.to(device)
    bias = torch.linspace(-1, 1, matrix.shape[0]).to(device, x.dtype)
    y = op.product_of(matrix, **settings)(x, None, bias)
    expected = x.double() @ dequantize(matrix, torch.float64).t() + bias.double()
    assert y.shape == expected.shape and y.dtype == x.dtype
    return ((y.double() - expected).norm() / expected.norm()).item()


def rows(device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))
    return x.to(device, dtype)


@pytest.mark.parametrize("m", [1, 2, 7, 17, 33, 63, 64, 65])
def test_numbers_of_rows(device, m):
    kind = KINDS[m % len(KINDS)]
    matrix = random_matrix(kind, 16, 64, group=32)
    assert error_of(device, rows(device, m, 64), matrix) < 1e-2


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("fp8", {"group": 128, "rows": BLOCK_ROWS}),
        ("int4", {"group": 128, "zeros": "zero", "order": True}),
        ("nf4", {"group": 64}),
    ],
)
def test_many_rows_with_the_matrix_dequantized(device, kind, settings):
    assert error_of(device, rows(device, 80, 256), random_matrix(kind, 48, 256, **settings)) < 1e-2


@pytest.mark.parametrize("kind, error", [("fp8", 0.04), ("int8", 0.015)])
def test_many_rows_in_8_bits(device, kind, error):
    matrix = random_matrix(kind, 48, 272, order=True)
    x = rows(device, 70, 272)
    assert op.multiplies_in_8_bits(x, prepare(matrix.to(device)))
    assert 2e-3 < error_of(device, x, matrix) < error
    assert error_of(device, x, matrix, in_8_bits=False) < 6e-3


def test_many_rows_in_blocks(device):
    """A scale for each 128 columns of a row, whose sizes differ by orders of magnitude."""
    matrix = random_matrix("fp8", 144, 384, group=128, rows=BLOCK_ROWS)
    x = rows(device, 5, 384)
    x[:, :128] *= 1e-3
    x[:, 256:] *= 1e3
    prepared = prepare(matrix.to(device))
    assert not op.QuantizedProduct(prepared).can_quantize(x)
    made = []

    def block_product(*args):
        made.append(args)
        return multiply_blocks_reference(*args)

    product = op.QuantizedProduct(prepared, block_product, few_rows=2)
    exact = x.double() @ dequantize(matrix, torch.float64).to(device).t()
    for part, few in ((x[:5], False), (x[:2], True)):
        bias = torch.linspace(-1, 1, 144).to(device, x.dtype)
        error = product(part, None, bias).double() - (exact[: len(part)] + bias.double())
        error = error.norm() / exact[: len(part)].norm()
        assert error < 1e-2 if few else 2e-3 < error < 0.04
        assert len(made) == 1
    product.in_8_bits = False
    error = product(x[:5], None, None).double() - exact[:5]
    assert error.norm() < 6e-3 * exact[:5].norm() and len(made) == 1


@pytest.mark.parametrize("few_rows, m", [(0, 2), (3, 3), (3, 18), (200, MAX_ROWS + 2)])
def test_switch_points_may_be_moved(device, few_rows, m):
    """Beyond the most rows of one kernel it reads the weights again."""
    matrix = random_matrix("int8", 16, 64).to(device)
    product = op.QuantizedProduct(prepare(matrix), few_rows=few_rows)
    x = rows(device, m, 64)
    quantized = m > few_rows and m > 16
    assert product.quantizes(x) == quantized
    y = product(x, None, None)
    expected = x.double() @ dequantize(matrix, torch.float64).t()
    error = (y.double() - expected).norm() / expected.norm()
    assert 2e-3 < error < 0.015 if quantized else error < 1e-2
    assert torch.equal(y, product.of_few_rows(x, None)) == (not quantized and m <= few_rows)


def test_rows_that_come_quantized(device):
    matrix = random_matrix("fp8", 48, 272)
    bias = torch.linspace(-1, 1, 48).to(device, torch.bfloat16)
    product = op.QuantizedProduct(prepare(matrix.to(device)), few_rows=2)
    x = rows(device, 3, 272)
    y = product(quantize_rows(x, product.matrix), None, bias)
    assert torch.equal(y, product(x, None, bias))


def test_rows_that_become_fp8_codes(device):
    """In two parts, with the error of few rows; in one part beyond; other kinds never."""
    matrix = random_matrix("fp8", 48, 272, order=True).to(device)
    product = op.QuantizedProduct(prepare(matrix), fp8_rows=range(2, 129))
    assert not product.in_8_bits or product.can_quantize(rows(device, 2, 272))
    bias = torch.linspace(-1, 1, 48).to(device, torch.bfloat16)
    for m, parts in ((2, 2), (op.TWO_PARTS, 2), (op.TWO_PARTS + 1, 1)):
        x = rows(device, m, 272)
        assert product.quantizes(x) and product.parts(x) == parts
        y = product(x, None, bias)
        assert torch.equal(y, product(quantize_rows(x, product.matrix, parts=parts), None, bias))
        expected = x.double() @ dequantize(matrix, torch.float64).t() + bias.double()
        error = (y.double() - expected).norm() / expected.norm()
        assert error < 6e-3 if parts == 2 else 0.01 < error < 0.04
    alone = rows(device, 1, 272)
    assert not product.quantizes(alone) and product.parts(alone) == 1
    product.in_8_bits = False
    assert product.quantizes(rows(device, 64, 272)) and not product.quantizes(rows(device, 65, 272))
    assert not product.quantizes(rows(device, 64, 272, dtype=torch.float16))
    eight = op.QuantizedProduct(prepare(random_matrix("int8", 48, 272, device=device)))
    eight.fp8_rows = range(2, 129)
    assert not eight.quantizes(rows(device, 40, 272))


def test_what_8_bits_cannot_serve(device):
    x = rows(device, 70, 256)
    eight = prepare(random_matrix("int8", 32, 256, device=device))
    assert not op.multiplies_in_8_bits(x.float(), eight)
    assert not op.multiplies_in_8_bits(x, prepare(random_matrix("int4", 32, 256, device=device)))
    grouped = prepare(random_matrix("int8", 32, 256, group=128, device=device))
    assert not op.multiplies_in_8_bits(x, grouped)
    odd = prepare(random_matrix("fp8", 40, 256, device=device))
    assert not op.multiplies_in_8_bits(x, odd)
    few = prepare(random_matrix("int8", 32, 256, device=device))
    assert op.multiplies_in_8_bits(x, few) and not op.multiplies_in_8_bits(x[:16], few)
    fp8 = prepare(random_matrix("fp8", 32, 256, device=device))
    assert not op.multiplies_in_8_bits(x.half(), fp8)


@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_that_the_kernels_do_not_serve(device, m, dtype):
    """Float32, a number of columns that is no multiple of 16, groups of 24."""
    x = rows(device, m, 72, dtype=dtype)
    for matrix in (random_matrix("int8", 10, 72), random_matrix("int4", 10, 72, group=24)):
        y = op.product_of(matrix.to(device))(x, None, None)
        expected = x.double() @ dequantize(matrix.to(device), torch.float64).t()
        torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.05)


def test_more_dimensions(device):
    matrix = random_matrix("int8", 16, 64, device=device)
    x = rows(device, 2, 3, 64, dtype=torch.float16)
    y = op.product_of(matrix)(x, None, None)
    assert torch.equal(y, op.product_of(matrix)(x.view(6, 64), None, None).view(2, 3, 16))
