"""What bitsandbytes quantizes, against what it dequantizes from that."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.quant_tools.reading import read_matrix, weight

ROWS, COLUMNS = 96, 512


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits(kind: str, size: int, nested: bool) -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight(ROWS, COLUMNS), blocksize=size, quant_type=kind, compress_statistics=nested
    )
    stored = {"weight": codes}
    stored |= {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    matrix, found = read_matrix(config, stored, ROWS, COLUMNS)
    assert matrix.group == size
    expected = functional.dequantize_4bit(codes, state).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_int8() -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    values, largest, _ = functional.int8_vectorwise_quant(weight(ROWS, COLUMNS).half())
    stored = {
        "weight": values,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    _, found = read_matrix(config, stored, ROWS, COLUMNS)
    expected = functional.int8_vectorwise_dequant(values, largest)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
