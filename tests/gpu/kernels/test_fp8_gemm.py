"""Products of fp8 rows, in one part and in two, against float64 products of what they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_llm.gpu.kernels import fp8_gemm as op
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig
from hetero_llm.quantization.matrix import BLOCK_ROWS
from tests.quantization.matrices import random_matrix

SMALL = SkinnyConfig(16, 64, 64, num_warps=4, num_stages=3)


def inputs(device, m: int, n: int, k: int, parts: int) -> tuple[PreparedMatrix, QuantizedRows]:
    matrix = prepare(random_matrix("fp8", n, k, device=device))
    generator = torch.Generator().manual_seed(m * 1_000_003 + n * 1009 + k)
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    return matrix, quantize_rows(x, matrix, parts=parts)


def check(matrix: PreparedMatrix, rows: QuantizedRows, config: SkinnyConfig | None = None) -> None:
    bias = torch.linspace(-1, 1, matrix.shape[0]).to(matrix.device, torch.bfloat16)
    for added in (None, bias):
        y = op.fp8_linear(rows, matrix, added, config=config)
        expected = op.fp8_linear_reference(rows, matrix, added)
        assert y.shape == expected.shape and y.dtype == torch.bfloat16
        if y.numel() > 0:
            error = (y.double() - expected.double()).abs().max() / expected.abs().max()
            assert error < 1e-2


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("m", [0, 1, 8, 9, 31, 65])
def test_numbers_of_rows(device, m, parts):
    """With the launch that `choose` names, also where K is no multiple of its tile."""
    check(*inputs(device, m, 80, 304, parts))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("split_k", [2, 3])
def test_shares_of_columns_add_up(device, split_k, waits, parts):
    config = replace(SMALL, split_k=split_k, waits=waits)
    check(*inputs(device, 5, 80, 304, parts), config)


def test_tiles_of_rows_share_features(device):
    check(*inputs(device, 130, 64, 64, 1), replace(SMALL, block_m=128))


@pytest.mark.parametrize("m", [2, 64])
def test_two_parts_are_the_rows_in_16_bits(device, m):
    """Up to the rounding of the result, where one part is off by what e4m3 rounds away."""
    matrix = prepare(random_matrix("fp8", 64, 512, device=device))
    x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m)).to(device, torch.bfloat16)
    weight = matrix.data.view(torch.float8_e4m3fn).double() * matrix.row_scale[:, None].double()
    plain = prepare(random_matrix("fp8", 64, 512, device=device))
    assert torch.equal(plain.data, matrix.data)
    # Both sides in the order of the matrix's codes.
    columns = torch.arange(512, device=device).view(-1, 2, matrix.lanes).transpose(1, 2).flatten()
    exact = x.double()[:, columns] @ weight.t()
    errors = []
    for parts in (1, 2):
        y = op.fp8_linear(quantize_rows(x, matrix, parts=parts), matrix)
        errors.append(((y.double() - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.01 and errors[1] < 5e-3


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (576, 1536)]
)
@pytest.mark.parametrize("m", [2, 8, 32, 64, 128, 256])
def test_chosen_launches_fit_the_device(m, shape):
    matrix = prepare(random_matrix("fp8", 16, 64))
    matrix = replace(matrix, shape=shape, data=torch.empty(shape[0], shape[1] // 2, device="meta"))
    for parts in (1, 2) if m <= 64 else (1,):
        config = op.choose(m, matrix, parts)
        assert op.fits(config, m, matrix)
        assert op.shared_bytes(config, parts) <= 227 << 10
        assert config.block_n >= 64 and config.num_warps % 4 == 0, "else no fp8 tensor cores"


def test_what_it_serves():
    assert op.serves(prepare(random_matrix("fp8", 16, 64)))
    assert not op.serves(prepare(random_matrix("fp8", 144, 256, group=128, rows=BLOCK_ROWS)))
    assert not op.serves(prepare(random_matrix("int8", 16, 64)))
