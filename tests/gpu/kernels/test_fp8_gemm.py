"""Products of fp8 rows against float64 products of what they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_llm.gpu.kernels import fp8_gemm as op
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.gpu.kernels.skinny_gemm import MAX_TILES, SkinnyConfig
from hetero_llm.quantization.matrix import BLOCK_ROWS
from tests.quantization.matrices import random_matrix

SMALL = SkinnyConfig(16, 64, 64, num_warps=4, num_stages=3)


def inputs(device, m: int, n: int, k: int) -> tuple[PreparedMatrix, QuantizedRows]:
    matrix = prepare(random_matrix("fp8", n, k, device=device))
    generator = torch.Generator().manual_seed(m * 1_000_003 + n * 1009 + k)
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    return matrix, quantize_rows(x, matrix)


def check(matrix: PreparedMatrix, rows: QuantizedRows, config: SkinnyConfig | None = None) -> None:
    bias = torch.linspace(-1, 1, matrix.shape[0]).to(matrix.device, torch.bfloat16)
    for added in (None, bias):
        y = op.fp8_linear(rows, matrix, added, config=config)
        expected = op.fp8_linear_reference(rows, matrix, added)
        assert y.shape == expected.shape and y.dtype == torch.bfloat16
        if y.numel() > 0:
            error = (y.double() - expected.double()).abs().max() / expected.abs().max()
            assert error < 1e-2


@pytest.mark.parametrize("m", [0, 1, 65, 129])
def test_numbers_of_rows(device, m):
    """With the launch that `choose` names, also where K is no multiple of its tile."""
    check(*inputs(device, m, 80, 304))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("split_k", [2, 3])
def test_shares_of_columns_add_up(device, split_k, waits):
    config = replace(SMALL, split_k=split_k, waits=waits)
    check(*inputs(device, 5, 80, 304), config)


def test_tiles_of_rows_share_features(device):
    check(*inputs(device, 130, 64, 64), replace(SMALL, block_m=64))


def of_shape(n: int, k: int) -> PreparedMatrix:
    """A matrix without data."""
    matrix = prepare(random_matrix("fp8", 16, 64))
    return replace(matrix, shape=(n, k), data=torch.empty(n, k // 2, device="meta"))


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (28672, 4096), (4096, 14336), (2048, 2048), (960, 576), (64, 48)]
)
@pytest.mark.parametrize("m", [2, 65, 128, 129, 256])
def test_chosen_launches_fit_the_device(m, shape):
    matrix = of_shape(*shape)
    config = op.choose(m, matrix)
    assert op.fits(config, m, matrix)
    assert op.shared_bytes(config) <= 227 << 10
    assert config.block_n >= 64 and config.num_warps % 4 == 0, "else no fp8 tensor cores"


@pytest.mark.parametrize(
    "shape, block_n, block_k, split_k, num_stages",
    [
        ((6144, 4096), 64, 128, 2, 4),
        ((4096, 4096), 64, 256, 2, 4),
        ((28672, 4096), 128, 128, 1, 3),
        ((4096, 14336), 64, 256, 2, 4),
    ],
)
def test_launches_of_128_rows_are_those_measured(shape, block_n, block_k, split_k, num_stages):
    config = op.choose(128, of_shape(*shape))
    assert config == SkinnyConfig(128, block_n, block_k, split_k, 4, num_stages)


def test_what_it_serves():
    assert op.serves(prepare(random_matrix("fp8", 16, 64)))
    assert not op.serves(prepare(random_matrix("fp8", 144, 256, group=128, rows=BLOCK_ROWS)))
    assert not op.serves(prepare(random_matrix("int8", 16, 64)))


def test_each_tile_of_rows_has_a_counter():
    """Of a split product: with as many rows as a tile has the counters suffice, with more not."""
    config = replace(SMALL, block_n=16, split_k=2)
    matrix = of_shape(16 * MAX_TILES, 128)
    assert op.fits(config, config.block_m, matrix)
    assert not op.fits(config, config.block_m + 1, matrix)
    assert op.fits(replace(config, split_k=1), config.block_m + 1, matrix)


def test_rows_that_were_quantized_for_another_matrix(device):
    matrix, rows = inputs(device, 3, 64, 128)
    _, narrow = inputs(device, 3, 64, 64)
    with pytest.raises(AssertionError):
        op.fp8_linear(narrow, matrix)
    with pytest.raises(AssertionError):
        op.fp8_linear(replace(rows, codes=rows.codes.view(torch.int8)), matrix)
