"""Rows in 8 bits and the scales of their products against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels import quantize_rows as op
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.quantization.matrix import dequantize
from tests.quantization.matrices import random_matrix


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    "m, k, dtype, order",
    [
        (5, 272, torch.bfloat16, False),
        (2, 2300, torch.float16, True),
        (3, 40, torch.float32, False),
        (0, 64, torch.bfloat16, False),
    ],
)
def test_equals_the_reference(device, kind, m, k, dtype, order):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(m, k + 8, generator=generator).to(device, dtype)[:, 8:]
    matrix = prepare(random_matrix(kind, 16, k, order=order, device=device))
    codes, scales = op.quantize_rows(x, matrix)
    expected, expected_scales = op.quantize_rows_reference(x, matrix)
    assert codes.dtype == expected.dtype and codes.shape == expected.shape
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A number in the middle between two codes may become either.
    differ = (codes.view(torch.uint8) != expected.view(torch.uint8)).float()
    assert m == 0 or differ.mean() < 5e-3
    values, expected_values = codes.float() * scales, expected.float() * scales
    torch.testing.assert_close(values, expected_values, rtol=0.13, atol=0.02)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_codes_are_in_the_order_of_the_matrix(device, kind):
    """The product of codes is the product of what they stand for."""
    matrix = random_matrix(kind, 16, 320, order=True, device=device)
    prepared = prepare(matrix)
    x = torch.randn(4, 320, generator=torch.Generator().manual_seed(3)).to(device)
    codes, scales = op.quantize_rows(x, prepared)
    stored = prepared.data.view(codes.dtype).double()
    y = codes.double() @ stored.t() * scales * prepared.row_scale
    expected = x.double() @ dequantize(matrix, torch.float64).t()
    assert (y - expected).norm() / expected.norm() < {"fp8": 0.04, "int8": 0.015}[kind]


def test_a_row_of_zeros(device):
    matrix = prepare(random_matrix("fp8", 16, 64, device=device))
    codes, scales = op.quantize_rows(torch.zeros(2, 64, device=device), matrix)
    assert (codes.float() == 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_of_products(device, has_bias):
    generator = torch.Generator().manual_seed(1)
    sums = torch.randint(-(10**6), 10**6, (3, 1100), generator=generator, dtype=torch.int32)
    row_scales = torch.rand(3, 1, generator=generator).to(device)
    feature_scales = torch.rand(1100, generator=generator).to(device) * 1e-5
    bias = torch.randn(1100, generator=generator).to(device, torch.float16) if has_bias else None
    arguments = (sums.to(device), row_scales, feature_scales, bias)
    y = op.scale_products(*arguments, torch.empty(3, 1100, dtype=torch.float16, device=device))
    expected = op.scale_products_reference(*arguments, torch.empty_like(y))
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-6)
