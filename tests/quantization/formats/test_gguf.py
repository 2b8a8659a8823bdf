"""Matrices of a GGUF file: one tensor of blocks each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.matrix import dequantize
from tests.helpers.gguf_blocks import numbers, random_tensor

TYPES = {"a": "Q4_0", "b": "Q6_K"}


@pytest.mark.parametrize(("module", "row_bytes"), [("a", 288), ("b", 420)])
def test_matrices(module: str, row_bytes: int) -> None:
    scheme = read_format({"quant_method": "gguf", "types": TYPES}).scheme(module)
    assert scheme is not None
    (part,) = scheme.parts(3, 512)
    assert (part.suffix, part.types, part.shapes) == ("weight", (TYPES[module],), ((3, row_bytes),))
    raw = random_tensor(TYPES[module], 3, 512, np.random.default_rng(0))
    matrix = scheme.convert({"weight": torch.from_numpy(raw)}, 3, 512)
    expected = torch.from_numpy(numbers(TYPES[module], raw))
    torch.testing.assert_close(dequantize(matrix, torch.float32), expected, rtol=1e-3, atol=1e-6)


def test_other_modules_are_plain() -> None:
    form = read_format({"quant_method": "gguf", "types": TYPES})
    assert form.name == "gguf" and form.scheme("c") is None


def test_rows_that_are_no_whole_blocks() -> None:
    scheme = read_format({"quant_method": "gguf", "types": TYPES}).scheme("b")
    assert scheme is not None
    with pytest.raises(ValueError, match="rows of 288 are no multiple of the 256 elements of a Q6"):
        scheme.parts(3, 288)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "types=None is not supported, an object"),
        ({"types": ["Q4_0"]}, "types=.*an object"),
        ({"types": {"a": "Q5_K"}}, "types='Q5_K' is not supported, 'Q4_0' or 'Q4_1'"),
        ({"types": {"a": 4}}, "types=4 is not supported"),
    ],
)
def test_wrong_types(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format({"quant_method": "gguf", **config})
