"""Rows that the bench of perplexity rounds are those that a GPU's kernel makes."""

from __future__ import annotations

import pytest
import torch

from bench.engine.perplexity import rounded_rows
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows_reference
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS
from tests.quantization.matrices import random_matrix


@pytest.mark.parametrize(
    "kind, group, rows", [("fp8", None, 1), ("int8", None, 1), ("fp8", 128, BLOCK_ROWS)]
)
def test_rounded_rows_are_those_of_the_kernel(kind, group, rows):
    columns = 320 if group else 304  # of blocks the last one is a part
    matrix = random_matrix(kind, 128, columns, group=group, rows=rows)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    prepared = prepare(matrix)
    codes = quantize_rows_reference(x, prepared)
    values = codes.codes[:3].float().view(3, -1, prepared.lanes, 2).transpose(2, 3).flatten(1)
    scales = codes.scales[:3].repeat_interleave(group or columns, 1)[:, :columns]
    expected = values[:, :columns] * scales
    # A number between two codes may go either way.
    different = (rounded_rows(x, matrix.kind, matrix.group) - expected).abs() > 1e-6
    assert different.float().mean() < 5e-3
    assert 0 < (expected - x).abs().max() < 0.1 * x.abs().max()
