"""Residual add and norm against the torch path: RMS norm, Gemma's, layer norm."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.norm import (
    add_gemma_rms_norm,
    add_gemma_rms_norm_reference,
    add_layer_norm,
    add_layer_norm_reference,
    add_rms_norm,
    add_rms_norm_reference,
    norm_projections,
    norm_projections_reference,
    quantized_rms_norm,
    quantizes_norms,
)
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS
from tests.gpu.kernels.test_quantize_rows import assert_same_rows
from tests.quantization.matrices import random_matrix

# The order of the sum of squares may decide a rounding, of the norm and then of the product. The
# interpreter cuts bfloat16 off instead of rounding it, three times in a row.
DEVICE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
INTERPRETER_TOLERANCE = DEVICE_TOLERANCE | {torch.bfloat16: 2**-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, size", [(1, 64), (5, 100), (3, 768), (2, 4096), (1, 5120), (1, 16384)]
)
@pytest.mark.parametrize("has_residual", [True, False])
def test_matches_torch(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, has_residual: bool
) -> None:
    torch.manual_seed(rows * size)
    x = torch.randn(rows, size, device=device, dtype=dtype)
    weight = torch.randn(size, device=device, dtype=dtype)
    residual = torch.randn_like(x) * 4 if has_residual else None
    expected_residual = residual.clone() if residual is not None else None
    norm, total = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_reference(x, expected_residual, weight, 1e-5)

    assert total is (x if residual is None else residual)
    on_device = device.type == "cuda"
    tolerance = (DEVICE_TOLERANCE if on_device else INTERPRETER_TOLERANCE)[dtype]
    if on_device or dtype != torch.bfloat16:
        assert torch.equal(total, expected_total)
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(norm, expected, rtol=tolerance, atol=tolerance)


def test_norm_is_of_the_rounded_sum(device: torch.device) -> None:
    """2048 + 1 is 2048 in float16: the norm must not see the 1."""
    x = torch.ones(1, 64, dtype=torch.float16, device=device)
    residual = torch.full_like(x, 2048.0)
    residual[0, 0] = 0.0
    norm, total = add_rms_norm(x, residual, torch.ones_like(x[0]), 0.0)
    expected = torch.full((1, 64), 2048.0)
    expected[0, 0] = 1.0
    assert torch.equal(total.cpu().float(), expected)
    exact = expected / expected.square().mean().sqrt()
    torch.testing.assert_close(norm.cpu().float(), exact, rtol=2**-10, atol=0.0)


def test_norm_is_rounded_before_the_weight(device: torch.device) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 96, dtype=torch.float16, device=device)
    weight = torch.randn(96, dtype=torch.float16, device=device)
    norm, _ = add_rms_norm(x, None, weight, 1e-6)
    plain, _ = add_rms_norm(x, None, torch.ones_like(weight), 1e-6)
    assert torch.equal(norm, plain * weight)
    once = (torch.nn.functional.rms_norm(x.float(), (96,), None, 1e-6) * weight.float()).half()
    assert not torch.equal(norm, once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, size", [(5, 100), (2, 2304), (1, 16384)])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("kind", ["gemma", "layer", "layer without bias", "bare layer"])
def test_others_match_torch(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, has_residual: bool, kind: str
) -> None:
    torch.manual_seed(rows * size)
    x = torch.randn(rows, size, device=device, dtype=dtype) + 0.5  # a mean to be taken off
    weight, bias = torch.randn(2, size, device=device, dtype=dtype)
    residual = torch.randn_like(x) * 4 if has_residual else None
    copy = residual.clone() if residual is not None else None
    if kind == "gemma":
        norm, total = add_gemma_rms_norm(x, residual, weight, 1e-5)
        expected, expected_total = add_gemma_rms_norm_reference(x, copy, weight, 1e-5)
    else:
        affine = (
            None if kind == "bare layer" else weight,
            bias if kind == "layer" else None,
        )
        (norm,), total = add_layer_norm(x, residual, None, [affine], 1e-5)
        (expected,), expected_total = add_layer_norm_reference(x, copy, None, [affine], 1e-5)

    assert total is (x if residual is None else residual)
    on_device = device.type == "cuda"
    tolerance = (DEVICE_TOLERANCE if on_device else INTERPRETER_TOLERANCE)[dtype]
    if on_device or dtype != torch.bfloat16:
        assert torch.equal(total, expected_total)
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(norm, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, size", [(5, 100), (2, 2304), (1, 8192)])
@pytest.mark.parametrize("has_extra", [True, False])
@pytest.mark.parametrize(
    "given", [[(True, True)], [(True, True)] * 2, [(True, False), (False, True)]]
)
def test_layer_norms_of_one_sum_of_three(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    size: int,
    has_extra: bool,
    given: list[tuple[bool, bool]],
) -> None:
    torch.manual_seed(rows * size)
    x, extra, residual = torch.randn(3, rows, size, device=device, dtype=dtype)
    addend = extra if has_extra else None
    weights = torch.randn(2 * len(given), size, device=device, dtype=dtype).unbind()
    affines = [
        (weights[2 * i] if weighted else None, weights[2 * i + 1] if biased else None)
        for i, (weighted, biased) in enumerate(given)
    ]
    copies = x.clone(), extra.clone(), residual.clone()
    expected, expected_total = add_layer_norm_reference(x, residual.clone(), addend, affines, 1e-5)
    norms, total = add_layer_norm(x, residual, addend, affines, 1e-5)

    assert total is residual and len(norms) == len(expected) == len(given)
    assert torch.equal(x, copies[0]) and torch.equal(extra, copies[1])
    on_device = device.type == "cuda"
    tolerance = (DEVICE_TOLERANCE if on_device else INTERPRETER_TOLERANCE)[dtype]
    if on_device or dtype != torch.bfloat16:
        assert torch.equal(total, expected_total)
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norms, expected, rtol=tolerance, atol=tolerance)


def test_a_sum_of_three_is_rounded_twice(device: torch.device) -> None:
    """In float16 (1 + 1) + 2048 is 2050, but (2048 + 1) + 1 is 2048."""
    ones = torch.ones(1, 64, dtype=torch.float16, device=device)
    for x, extra, residual, expected in ((1, 1, 2048, 2050), (2048, 1, 1, 2048)):
        _, total = add_layer_norm(ones * x, ones * residual, ones * extra, [(None, None)], 1e-5)
        assert torch.equal(total, ones * expected)


def test_gemma_rounds_the_product_only(device: torch.device) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 96, dtype=torch.float16, device=device)
    weight = torch.randn(96, dtype=torch.float16, device=device)
    norm, _ = add_gemma_rms_norm(x, None, weight, 1e-6)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), None, 1e-6) * (1 + weight.double())
    assert float((norm == exact.half()).float().mean()) > 0.99
    twice = torch.nn.functional.rms_norm(x, (96,), None, 1e-6) * (1 + weight)
    assert float((norm == twice).float().mean()) < 0.9


def test_a_layer_norm_far_from_zero_keeps_its_digits(device: torch.device) -> None:
    """The variance is that of the centred row, not a difference of large squares."""
    torch.manual_seed(0)
    x = torch.randn(2, 512, device=device) + 3e3
    (norm,), _ = add_layer_norm(x, None, None, [(None, None)], 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, queries, keys", [(1, 64, 16), (3, 96, 40), (2, 6144, 1024)])
def test_norms_of_projections(
    device: torch.device, dtype: torch.dtype, rows: int, queries: int, keys: int
) -> None:
    """In place, of rows with something behind them; values stay as they are."""
    torch.manual_seed(rows)
    wide = torch.randn(rows, queries + 2 * keys + 8, device=device).to(dtype) * 3
    qkv, expected = wide.clone()[:, :-8], wide.clone()[:, :-8]
    q_weight, k_weight = (torch.randn(n, device=device).to(dtype) for n in (queries, keys))
    assert norm_projections(qkv, q_weight, k_weight, 1e-5) is qkv
    norm_projections_reference(expected, q_weight, k_weight, 1e-5)
    tolerance = (DEVICE_TOLERANCE if device.type == "cuda" else INTERPRETER_TOLERANCE)[dtype]
    torch.testing.assert_close(qkv, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv[:, -keys:], wide[:, -keys - 8 : -8])
    assert len(norm_projections(qkv[:0], q_weight, k_weight, 1e-5)) == 0


def test_empty(device: torch.device) -> None:
    x = torch.empty(0, 64, device=device)
    ones = torch.ones(64, device=device)
    (first, second), same = add_layer_norm(x, None, None, [(ones, None), (None, ones)], 1e-5)
    for norm, total in (
        add_rms_norm(x, None, ones, 1e-5),
        add_gemma_rms_norm(x, None, ones, 1e-5),
        (first, same),
        (second, same),
    ):
        assert norm.shape == (0, 64) and total is x


def test_refuses_what_it_cannot_compute(device: torch.device) -> None:
    x = torch.ones(4, 64, device=device)
    weight = torch.ones(64, device=device)
    with pytest.raises(AssertionError):
        add_rms_norm(torch.ones(4, 128, device=device)[:, :64], None, weight, 1e-5)
    with pytest.raises(AssertionError):
        add_rms_norm(torch.ones(4, 64, device=device).half(), None, weight, 1e-5)
    with pytest.raises(AssertionError):
        add_rms_norm(x, x[:2], weight, 1e-5)
    for affines in (
        [(weight, weight.half())],
        [(weight[:32], None)],
        [(weight, None), (None, weight[:32])],
        [],
        [(None, None)] * 3,
    ):
        with pytest.raises(AssertionError):
            add_layer_norm(x, x.clone(), None, affines, 1e-5)
    for residual, extra in ((None, x), (x.clone(), x[:2]), (x.clone(), x.half())):
        with pytest.raises(AssertionError):
            add_layer_norm(x, residual, extra, [(weight, None)], 1e-5)


def matrix_of(kind: str, size: int, device: torch.device) -> PreparedMatrix:
    if kind == "blocks":
        return prepare(random_matrix("fp8", 16, size, group=128, rows=BLOCK_ROWS, device=device))
    assert kind in ("fp8", "int8")
    return prepare(random_matrix(kind, 16, size, device=device))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind, parts", [("fp8", 1), ("fp8", 2), ("int8", 1), ("blocks", 1)])
@pytest.mark.parametrize("size", [768, 576, 2304])
@pytest.mark.parametrize("has_residual, gemma", [(True, False), (False, True)])
def test_quantized_rows_equal_those_of_a_separate_pass(
    device: torch.device, kind: str, parts: int, size: int, has_residual: bool, gemma: bool
) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, size, device=device).bfloat16()
    x[1] = 0.0
    weight = torch.randn(size, device=device).bfloat16()
    residual = torch.randn_like(x) * 4 if has_residual else None
    expected_residual = residual.clone() if residual is not None else None
    matrix = matrix_of(kind, size, device)
    rows, total = quantized_rms_norm(
        x, residual, weight, 1e-5, matrix=matrix, gemma=gemma, parts=parts
    )
    plain = add_gemma_rms_norm if gemma else add_rms_norm
    norm, expected_total = plain(x, expected_residual, weight, 1e-5)
    assert total is (x if residual is None else residual) and torch.equal(total, expected_total)
    assert_same_rows(rows, quantize_rows(norm, matrix, parts=parts))


def test_norms_that_cannot_be_quantized(device: torch.device) -> None:
    assert quantizes_norms(matrix_of("blocks", 576, device))
    assert not quantizes_norms(matrix_of("int8", 16, device))  # shorter than a chunk
    assert not quantizes_norms(prepare(random_matrix("fp8", 16, 64, order=True, device=device)))
    assert not quantizes_norms(prepare(random_matrix("int8", 16, 64, group=16, device=device)))
    x = torch.zeros(0, 576, dtype=torch.bfloat16, device=device)
    matrix = matrix_of("blocks", 576, device)
    rows, total = quantized_rms_norm(x, None, x.new_ones(576), 1e-5, matrix=matrix, gemma=False)
    assert rows.codes.shape == (0, 576) and total is x
