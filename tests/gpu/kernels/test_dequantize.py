"""Prepared matrices written out, against the same of the matrices that they are made of."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.quantization.matrix import BLOCK_ROWS, dequantize, stack
from tests.quantization.matrices import random_matrix

# The interpreter cuts bits off bfloat16; values of nf4 are rounded before they are scaled.
ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(
    "kind, n, k, settings",
    [
        ("fp8", 40, 272, {}),
        ("fp8", 150, 272, {"group": 128, "rows": BLOCK_ROWS}),
        ("int8", 40, 200, {"group": 32, "order": True}),
        ("int4", 40, 256, {"group": 64, "zeros": "zero", "order": True}),
        ("int4", 33, 208, {"group": 16, "zeros": "offset", "row_scale": True}),
        ("int4", 8, 64, {}),
        ("nf4", 40, 272, {"group": 64}),
        ("fp4", 40, 272, {"group": 16, "scale_dtype": torch.float8_e4m3fn, "row_scale": True}),
    ],
)
def test_equals_the_reference(device, dtype, kind, n, k, settings):
    matrix = random_matrix(kind, n, k, **settings, device=device)
    frame = torch.full((n + 2, k), 7.0, dtype=dtype, device=device)
    out = dequantize_to(prepare(matrix), frame[1:-1])
    assert out.data_ptr() == frame[1:-1].data_ptr()
    expected = dequantize(matrix, torch.float32)
    torch.testing.assert_close(out.float(), expected, rtol=ERRORS[dtype], atol=1e-6)
    assert (frame[0] == 7).all() and (frame[-1] == 7).all()


def test_a_stack_whose_matrices_have_orders_of_their_own(device):
    matrices = [random_matrix("int4", 20, 64, group=32, order=True, seed=i) for i in range(3)]
    matrix = stack(matrices).to(device)
    out = torch.empty(60, 64, device=device)
    expected = dequantize(matrix, torch.float32)
    torch.testing.assert_close(dequantize_to(prepare(matrix), out), expected, rtol=1e-6, atol=1e-6)


def test_wrong_outputs_are_refused(device):
    matrix = prepare(random_matrix("fp8", 8, 64, device=device))
    for wrong in (torch.zeros(8, 32), torch.zeros(8, 64).double(), torch.zeros(64, 8).t()):
        with pytest.raises(AssertionError):
            dequantize_to(matrix, wrong.to(device))
