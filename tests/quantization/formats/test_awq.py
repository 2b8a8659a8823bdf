"""AWQ's interleaved words, and AutoRound's config for both packings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats.stored import (
    Numbers,
    assert_is,
    draw,
    matrix_of,
    numbers,
    read_quantize_config,
    scales,
    spread,
    words,
)

MODULE = "model.layers.3.mlp.up_proj"
ROWS, COLUMNS = 24, 64
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config(**options: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 16,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **options,
    }


def packed(group: int = 16, *, symmetric: bool = False) -> tuple[dict[str, Tensor], Numbers]:
    """Stored tensors and the matrix [ROWS, COLUMNS]."""
    groups = COLUMNS // group
    codes, zeros = draw(1, 0, 16, COLUMNS, ROWS), draw(2, 0, 16, groups, ROWS)
    if symmetric:
        zeros[:] = 8
    scale = scales(3, groups, ROWS, dtype=torch.float16)
    stored = {
        "qweight": words(codes, 4, ORDER),
        "qzeros": words(zeros, 4, ORDER),
        "scales": scale,
    }
    wide = spread(numbers(scale), group, 0) * (codes - spread(zeros, group, 0))
    return stored, wide.T


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_groups(group: int, symmetric: bool) -> None:
    stored, expected = packed(group, symmetric=symmetric)
    size = -1 if group == COLUMNS else group
    scheme = read_format(config(group_size=size, version="GEMM")).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert (matrix.kind, matrix.group, matrix.zero is None) == ("int4", group, symmetric)
    assert_is(matrix, expected)


def test_the_older_file() -> None:
    """quant_config.json, with keys of its own."""
    content = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    found = read_quantize_config(content)
    stored, expected = packed(32)
    assert found.name == "awq"
    assert_is(matrix_of(found.scheme(MODULE), stored, ROWS, COLUMNS), expected)


def test_plain_modules() -> None:
    found = read_format(config(modules_to_not_convert=["gate", "model.layers.7"]))
    for module in (
        "lm_head",
        "model.embed_tokens",
        "model.layers.1.moe.gate",
        "model.layers.7.mlp.up_proj",
    ):
        assert found.scheme(module) is None
    for module in ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.aggregate"):
        assert found.scheme(module) is not None


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scales_that_are_not_finite(value: float) -> None:
    stored, _ = packed()
    stored["scales"][1, 1] = value
    with pytest.raises(ValueError, match="scales: 1 of 96 values are not finite"):
        matrix_of(read_format(config()).scheme(MODULE), stored, ROWS, COLUMNS)


def test_parts() -> None:
    scheme = read_format(config()).scheme(MODULE)
    assert scheme is not None
    parts = {part.suffix: part for part in scheme.parts(ROWS, COLUMNS)}
    assert parts["qweight"].admits((64, 3)) and not parts["qweight"].admits((8, 24))
    assert parts["qzeros"].types == ("I32",) and not any(p.optional for p in parts.values())
    with pytest.raises(ValueError, match="does not divide its 20 rows"):
        scheme.parts(20, 64)
    with pytest.raises(ValueError, match="groups of 16 columns do not divide its 72 columns"):
        scheme.parts(24, 72)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "gemv"}, "version='gemv' is not supported, 'gemm' is"),
        ({"version": "gemv_fast"}, "version='gemv_fast'"),
        ({"bits": 8}, "bits=8 is not supported, 4 is"),
        ({"group_size": "128"}, "group_size='128'"),
        ({"modules_to_not_convert": "gate"}, "modules_to_not_convert='gate'"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(config(**options))


def test_a_matrix_whose_zero_points_are_all_8_has_none() -> None:
    stored, _ = packed(symmetric=True)
    matrix = matrix_of(read_format(config()).scheme(MODULE), stored, ROWS, COLUMNS)
    assert matrix.zero is None
    stored["qzeros"][0, 0] ^= 1
    matrix = matrix_of(read_format(config()).scheme(MODULE), stored, ROWS, COLUMNS)
    assert matrix.zero is not None and int((matrix.zero != 8).sum()) == 1
    assert np.argwhere(matrix.zero.numpy() != 8).tolist() == [[0, 0]]
