"""The banks of experts of gpt-oss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.formats.mxfp4 import quantize
from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.matrix import dequantize
from tests.quantization.formats.stored import (
    E2M1,
    Numbers,
    assert_is,
    draw,
    halves,
    matrix_of,
    spread,
)

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1"]}
BANK = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, ROWS, COLUMNS = 3, 4, 96


def packed() -> tuple[dict[str, Tensor], Numbers]:
    """Stored tensors, and the matrices [EXPERTS x ROWS, COLUMNS]."""
    codes = draw(1, 0, 16, EXPERTS * ROWS, COLUMNS)
    exponents = draw(2, 100, 140, EXPERTS * ROWS, COLUMNS // 32)
    stored = {
        "blocks": halves(codes).reshape(EXPERTS, ROWS, COLUMNS // 32, 16),
        "scales": torch.from_numpy(exponents.astype(np.uint8)).reshape(EXPERTS, ROWS, -1),
    }
    return stored, np.array(E2M1)[codes] * spread(2.0 ** (exponents - 127.0), 32)


def test_a_bank_is_the_rows_of_its_experts() -> None:
    stored, expected = packed()
    scheme = read_format(CONFIG).scheme(BANK)
    assert scheme is not None
    matrix = matrix_of(scheme, stored, EXPERTS * ROWS, COLUMNS)
    assert (matrix.kind, matrix.group) == ("fp4", 32)
    assert_is(matrix, expected)
    names = [f"{BANK}{part.joint}{part.suffix}" for part in scheme.parts(EXPERTS * ROWS, COLUMNS)]
    assert names == [f"{BANK}_blocks", f"{BANK}_scales"]


def test_all_else_is_plain() -> None:
    found = read_format(CONFIG)
    for module in (
        *("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router"),
        "model.layers.1.mlp.experts.gate_up_proj",
    ):
        assert found.scheme(module) is None
    assert found.scheme("model.layers.0.mlp.experts.down_proj") is not None


def test_rounding() -> None:
    """To the nearest number of the group's scale; the largest ones are cut, by less than a
    quarter."""
    weight = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0.0
    weight[1, :5] = torch.tensor([7.9, -7.9, 2.4, -0.2, 0.8])
    weight[1, 5:32] = 0.0
    matrix = quantize(weight)
    found = dequantize(matrix, torch.float32)
    assert (found[0, :32] == 0).all()
    assert found[1, :5].tolist() == [6.0, -6.0, 2.0, 0.0, 1.0]
    scale = matrix.scale.float().repeat_interleave(32, 1)
    assert (torch.frexp(matrix.scale.float()).mantissa == 0.5).all()
    values = torch.tensor(E2M1, dtype=torch.float32)
    nearest = (values * scale.unsqueeze(2) - weight.unsqueeze(2)).abs().amin(2)
    torch.testing.assert_close((found - weight).abs(), nearest)
    assert ((found - weight).abs() <= 0.25 * weight.abs().amax(1, keepdim=True)).all()


def test_broken_banks() -> None:
    stored, _ = packed()
    scheme = read_format(CONFIG).scheme(BANK)
    assert scheme is not None
    with pytest.raises(ValueError, match="their matrices have 8 rows of 96 columns"):
        matrix_of(scheme, stored, 2 * ROWS, COLUMNS)
    with pytest.raises(ValueError, match=r"scales \[2, 4, 3\]"):
        matrix_of(scheme, stored | {"scales": stored["scales"][:2]}, 3 * ROWS, COLUMNS)
    stored["scales"][0, 0, 0] = 255
    with pytest.raises(ValueError, match="scales: 1 of 36 values are not finite"):
        matrix_of(scheme, stored, 3 * ROWS, COLUMNS)
    with pytest.raises(ValueError, match="groups of 32 columns do not divide its 80 columns"):
        scheme.parts(12, 80)
