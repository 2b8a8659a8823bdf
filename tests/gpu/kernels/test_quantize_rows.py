"""Rows in 8 bits and the scales of their products against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels import quantize_rows as op
from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS, dequantize
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
    rows, expected = op.quantize_rows(x, matrix), op.quantize_rows_reference(x, matrix)
    assert rows.codes.dtype == expected.codes.dtype and rows.codes.shape == expected.codes.shape
    assert rows.num_rows == m and rows.dtype == dtype
    torch.testing.assert_close(rows.scales, expected.scales, rtol=1e-6, atol=0)
    # A number in the middle between two codes may become either.
    differ = (rows.codes.view(torch.uint8) != expected.codes.view(torch.uint8)).float()
    assert m == 0 or differ.mean() < 5e-3
    values, expected_values = (r.codes.float() * rows.scales for r in (rows, expected))
    torch.testing.assert_close(values, expected_values, rtol=0.13, atol=0.02)


@pytest.mark.parametrize("m, k, order", [(5, 272, False), (2, 2300, True)])
def test_two_parts_are_the_row(device, m, k, order):
    """Exactly, down to 2^-9 of its largest number; below that to 2^-17 of it."""
    generator = torch.Generator().manual_seed(k)
    sizes = torch.exp2(torch.randint(-14, 1, (m, k), generator=generator).float())
    x = (torch.randn(m, k, generator=generator) * sizes).to(device, torch.bfloat16)
    x[1] = 0.0
    matrix = prepare(random_matrix("fp8", 16, k, order=order, device=device))
    rows = op.quantize_rows(x, matrix, parts=2)
    assert rows.codes.shape == (2, m, matrix.padded_columns) and rows.parts == 2
    expected = op.quantize_rows_reference(x, matrix, parts=2)
    assert torch.equal(rows.scales, expected.scales)
    assert torch.equal(rows.codes.float(), expected.codes.float())  # zeros have two signs
    back = (rows.codes.float() * rows.scales).sum(0)
    back = back.view(m, -1, matrix.lanes, 2).transpose(2, 3).flatten(1)
    assert not back[:, k:].any()
    ordered = x.float() if matrix.order is None else x.float()[:, matrix.order.long()]
    error, peak = (back[:, :k] - ordered).abs(), ordered.abs().amax(1, keepdim=True)
    assert not error[ordered.abs() >= peak * 2**-9].any()
    assert (error <= peak * 2**-17).all()


def blocks_of(k: int, device: torch.device) -> PreparedMatrix:
    return prepare(random_matrix("fp8", 144, k, group=128, rows=BLOCK_ROWS, device=device))


@pytest.mark.parametrize("m, k", [(5, 384), (8, 2304), (1, 576), (0, 128)])
def test_groups_of_columns_equal_the_reference(device, m, k):
    matrix = blocks_of(k, device)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(device, torch.bfloat16)
    rows, expected = op.quantize_rows(x, matrix), op.quantize_rows_reference(x, matrix)
    padded = -(-m // 4) * 4
    assert rows.codes.shape == (padded, k) and rows.scales.shape == (padded, -(-k // 128))
    assert rows.scales.stride() == (1, padded) or m == 0
    torch.testing.assert_close(rows.scales[:m], expected.scales[:m], rtol=1e-6, atol=0)
    differ = rows.codes[:m].view(torch.uint8) != expected.codes[:m].view(torch.uint8)
    assert m == 0 or differ.float().mean() < 5e-3


@pytest.mark.parametrize(
    "kind, k, parts", [("fp8", 272, 1), ("fp8", 272, 2), ("int8", 2300, 1), ("blocks", 384, 1)]
)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gates_equal_the_separate_pass(device, kind, k, parts, name):
    matrix = blocks_of(k, device) if kind == "blocks" else None
    matrix = matrix or prepare(random_matrix(kind, 16, k, device=device))
    generator = torch.Generator().manual_seed(k)
    gate_up = torch.randn(3, 2 * k + 8, generator=generator).to(device, torch.bfloat16)[:, 8:]
    assert_same_rows(
        op.quantize_gated(gate_up, name, matrix, parts=parts),
        op.quantize_rows(gated_activation(gate_up, name), matrix, parts=parts),
    )
    reference = op.quantize_gated_reference(gate_up, name, matrix)
    values = op.quantize_gated(gate_up, name, matrix).codes[:3].float()
    assert (values - reference.codes[:3].float()).norm() < 0.03 * values.norm()


def assert_same_rows(rows: op.QuantizedRows, expected: op.QuantizedRows) -> None:
    """Bit by bit, but for rows of padding."""
    m = expected.num_rows
    assert rows.num_rows == m and rows.dtype == expected.dtype
    assert rows.scales.stride() == expected.scales.stride()
    assert torch.equal(rows.scales[:m], expected.scales[:m])
    codes, expected_codes = (r.codes[..., :m, :].view(torch.uint8) for r in (rows, expected))
    assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_codes_are_in_the_order_of_the_matrix(device, kind):
    """The product of codes is the product of what they stand for."""
    matrix = random_matrix(kind, 16, 320, order=True, device=device)
    prepared = prepare(matrix)
    x = torch.randn(4, 320, generator=torch.Generator().manual_seed(3)).to(device)
    rows = op.quantize_rows(x, prepared)
    stored = prepared.data.view(rows.codes.dtype).double()
    y = rows.codes.double() @ stored.t() * rows.scales * prepared.row_scale
    expected = x.double() @ dequantize(matrix, torch.float64).t()
    assert (y - expected).norm() / expected.norm() < {"fp8": 0.04, "int8": 0.015}[kind]


def test_a_row_of_zeros(device):
    matrix = prepare(random_matrix("fp8", 16, 64, device=device))
    rows = op.quantize_rows(torch.zeros(2, 64, device=device), matrix)
    assert (rows.codes.float() == 0).all() and rows.scales.isfinite().all()


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
