"""The "fp8" method: scales of the matrix, of rows and of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats.stored import (
    assert_is,
    e4m3_bytes,
    e4m3_numbers,
    e4m3_tensor,
    matrix_of,
    numbers,
    scales,
    spread,
)

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 10, 24


def config(**options: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **options}


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_the_matrix_or_of_rows(
    suffix: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    codes = e4m3_bytes(1, ROWS, COLUMNS)
    scale = scales(2, *shape, dtype=dtype)
    stored = {
        "weight": e4m3_tensor(codes),
        suffix: scale,
        "input_scale": torch.tensor(3.0),  # changes nothing
    }
    scheme = read_format(config(activation_scheme="static")).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert matrix.kind == "fp8" and matrix.rows == 1 and matrix.scale.dtype == dtype
    assert_is(matrix, e4m3_numbers(codes) * numbers(scale).reshape(-1, 1))


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (5, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_ragged_last_ones(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    codes = e4m3_bytes(3, rows, columns)
    scale = scales(4, -(-rows // 128), -(-columns // 128), dtype=dtype)
    stored = {"weight": e4m3_tensor(codes), "weight_scale_inv": scale}
    scheme = read_format(config(weight_block_size=[128, 128], fmt="e4m3")).scheme(MODULE)
    matrix = matrix_of(scheme, stored, rows, columns)
    assert (matrix.rows, matrix.group) == (128, 128)
    wide = spread(spread(numbers(scale), 128), 128, 0)[:rows, :columns]
    assert_is(matrix, e4m3_numbers(codes) * wide)


def test_blocks_of_other_sizes_and_of_exponents() -> None:
    codes = e4m3_bytes(5, 70, 96)
    exponents = np.array([[120, 127, 130], [1, 0, 140], [127, 126, 100]], np.uint8)
    scheme = read_format(config(weight_block_size=[32, 32], scale_fmt="ue8m0")).scheme(MODULE)
    stored = {"weight": e4m3_tensor(codes), "weight_scale_inv": torch.from_numpy(exponents)}
    matrix = matrix_of(scheme, stored, 70, 96)
    assert matrix.rows == 1 and matrix.scale.dtype == torch.bfloat16
    wide = spread(spread(2.0 ** (exponents.astype(float) - 127), 32), 32, 0)[:70]
    assert_is(matrix, e4m3_numbers(codes) * wide)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_plain_modules(key: str) -> None:
    listed = ["model.layers.0.self_attn.q_proj", "mlp.gate", "vision", "re:.*shared.*", "^layers.3"]
    found = read_format(config(**{key: listed}))
    for module in (
        *("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.4.mlp.gate"),
        *("vision.blocks.1.proj", "model.layers.1.mlp.shared_expert.up_proj", "layers.3.q_proj"),
    ):
        assert found.scheme(module) is None, module
    for module in (
        *("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate_proj"),
        *("model.layers.10.self_attn.q_proj", "layers.30.q_proj", "model.layers.0.output"),
    ):
        assert found.scheme(module) is not None, module


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("block", [None, [128, 128]])
def test_scales_that_are_not_finite(value: float, block: list[int] | None) -> None:
    scheme = read_format(config(weight_block_size=block)).scheme(MODULE)
    shape = (2, 2) if block else (200, 1)
    scale = scales(6, *shape)
    scale[1, 0] = value
    stored = {"weight": e4m3_tensor(e4m3_bytes(7, 200, 130)), "weight_scale_inv": scale}
    with pytest.raises(ValueError, match=rf"weight_scale_inv: 1 of {scale.numel()} values are not"):
        matrix_of(scheme, stored, 200, 130)


def test_an_exponent_that_is_no_number() -> None:
    scheme = read_format(config(weight_block_size=[128, 128])).scheme(MODULE)
    stored = {
        "weight": e4m3_tensor(e4m3_bytes(7, 4, 4)),
        "weight_scale_inv": torch.tensor([[255]], dtype=torch.uint8),
    }
    with pytest.raises(ValueError, match="weight_scale_inv: 1 of 1 values are not finite"):
        matrix_of(scheme, stored, 4, 4)


def test_one_spelling_of_the_scale_is_needed() -> None:
    scheme = read_format(config()).scheme(MODULE)
    stored = {"weight": e4m3_tensor(e4m3_bytes(8, 4, 4))}
    with pytest.raises(ValueError, match="neither of weight_scale and weight_scale_inv"):
        matrix_of(scheme, stored, 4, 4)
    both = {"weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)}
    with pytest.raises(ValueError, match="both of weight_scale and weight_scale_inv"):
        matrix_of(scheme, stored | both, 4, 4)


def test_types_and_shapes_that_are_asked_for() -> None:
    scheme = read_format(config(weight_block_size=[128, 128])).scheme(MODULE)
    assert scheme is not None
    weight, scale, *_ = scheme.parts(300, 200)
    assert (weight.suffix, weight.types, weight.shapes) == ("weight", ("F8_E4M3",), ((300, 200),))
    assert scale.shapes == ((3, 2),) and not scale.admits((2, 3)) and "I32" not in scale.types


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_scheme": "block"},
            "activation_scheme='block' is not supported, 'dyn",
        ),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported, \[rows"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": "128"}, "weight_block_size='128'"),
        ({"ignored_layers": "lm_head"}, "ignored_layers='lm_head'"),
        ({"modules_to_not_convert": ["re:("]}, "modules_to_not_convert: .* no regular expression"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(config(**options))
