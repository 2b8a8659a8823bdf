"""The library's product of fp8 rows with a matrix of blocks: layouts, and the trial before use."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from hetero_llm.gpu.kernels import block_product as op
from hetero_llm.gpu.kernels.quantize_rows import (
    QuantizedRows,
    quantize_rows,
    quantize_rows_reference,
)
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS, dequantize
from tests.quantization.matrices import random_matrix


def blocks(n: int, k: int, scale_dtype: torch.dtype = torch.float32) -> PreparedMatrix:
    matrix = random_matrix("fp8", n, k, group=128, rows=BLOCK_ROWS, scale_dtype=scale_dtype, seed=n)
    return prepare(matrix)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, k", [(272, 640), (128, 256), (400, 576)])
def test_scales_are_those_of_the_blocks(n, k, scale_dtype):
    matrix = random_matrix("fp8", n, k, group=128, rows=BLOCK_ROWS, scale_dtype=scale_dtype, seed=n)
    scales = op.block_scales(prepare(matrix))
    groups = -(-k // 128)
    assert scales.shape == (-(-groups // 4) * 4, -(-n // 128)) and scales.stride(0) == 1
    assert torch.equal(scales[:groups].t(), matrix.scale.float())
    assert (scales[groups:] == 0).all()


def test_the_reference_is_the_product_of_what_codes_stand_for(device):
    matrix = random_matrix("fp8", 272, 640, group=128, rows=BLOCK_ROWS)
    prepared = prepare(matrix.to(device))
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(0)).to(device).bfloat16()
    y = op.multiply_blocks_reference(
        quantize_rows(x, prepared), prepared, op.block_scales(prepared)
    )
    expected = x.double() @ dequantize(matrix, torch.float64).to(device).t()
    assert (y[:6].double() - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("m, k", [(64, 640), (7, 1024)])
def test_layouts_are_what_torch_asks_for(m, k):
    """torch checks shapes and strides of tensors without memory as it does of others."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip("torch has no product with blocks")
    matrix = blocks(256, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, scales = quantize_rows_reference(x, matrix), op.block_scales(matrix)

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def multiply(row_scales: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        there = QuantizedRows(on_meta(rows.codes), on_meta(row_scales), m, rows.dtype)
        data = on_meta(matrix.data)
        return op.multiply_blocks(there, replace(matrix, data=data), on_meta(scales))

    assert multiply(rows.scales, scales).shape == (-(-m // 4) * 4, 256)
    for wrong in ((rows.scales.contiguous(), scales), (rows.scales, scales[:-1])):
        with pytest.raises((RuntimeError, ValueError)):
            multiply(*wrong)


def test_a_product_that_is_right_is_used():
    cpu = torch.device("cpu")
    reference = op.multiply_blocks_reference
    assert op.find_block_product(cpu, reference) is reference


def refuses(*_: object) -> torch.Tensor:
    raise RuntimeError("DeepSeek style scaling only supported in CUDA for SM90")


def ignores_scales(rows: QuantizedRows, matrix: PreparedMatrix, scales: torch.Tensor):
    return op.multiply_blocks_reference(rows, matrix, torch.ones_like(scales))


def loses_the_last_group(rows: QuantizedRows, matrix: PreparedMatrix, scales: torch.Tensor):
    scales = scales.clone()
    scales[matrix.groups - 1] = 0
    return op.multiply_blocks_reference(rows, matrix, scales)


@pytest.mark.parametrize(
    "candidate, reason",
    [(refuses, "only supported"), (ignores_scales, "error of"), (loses_the_last_group, "error of")],
)
def test_one_that_refuses_or_is_wrong_is_not(caplog, candidate, reason):
    with caplog.at_level(logging.WARNING):
        assert op.find_block_product(torch.device("cpu"), candidate) is None
    (record,) = caplog.records
    assert reason in record.message and "dequantized" in record.message


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the library has these products on Hopper",
)
@pytest.mark.parametrize("m, n, k", [(1, 256, 640), (130, 400, 576), (512, 4096, 4096)])
def test_the_library_on_a_device(device, m, n, k):
    device = torch.device(device.type, torch.cuda.current_device())
    assert op.find_block_product(device) is op.multiply_blocks
    matrix = random_matrix("fp8", n, k, group=128, rows=BLOCK_ROWS, device=device)
    prepared = prepare(matrix)
    scales = op.block_scales(prepared)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(device).bfloat16()

    def multiply() -> torch.Tensor:
        return op.multiply_blocks(quantize_rows(x, prepared), prepared, scales)[:m]

    y = multiply()
    expected = op.multiply_blocks_reference(quantize_rows(x, prepared), prepared, scales)[:m]
    assert (y.double() - expected.double()).norm() < 4e-3 * expected.double().norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = multiply()
    graph.replay()
    assert torch.equal(captured, y)


def test_what_has_no_blocks():
    for matrix in (
        random_matrix("fp8", 128, 256),
        random_matrix("fp8", 128, 256, group=128),
        random_matrix("int8", 128, 256, group=128, rows=BLOCK_ROWS),
        random_matrix("fp8", 128, 256, group=64, rows=BLOCK_ROWS),
        random_matrix("fp8", 128, 256, group=128, rows=BLOCK_ROWS, row_scale=True),
    ):
        assert not op.has_blocks(prepare(matrix))
    assert op.has_blocks(blocks(128, 256))
