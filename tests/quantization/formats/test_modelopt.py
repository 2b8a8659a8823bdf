"""ModelOpt: its algorithms, both places of its config, and what it leaves plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats.stored import (
    E2M1,
    assert_is,
    draw,
    e4m3_bytes,
    e4m3_numbers,
    e4m3_tensor,
    halves,
    matrix_of,
    numbers,
    read_hf_quant_config,
    scales,
    spread,
)

MODULE = "model.layers.3.mlp.up_proj"


def content(algorithm: str, **options: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **options}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}


def config(algorithm: str, **options: Any) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, **options}


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("FP8", ()), ("fp8", ()), ("FP8_PER_CHANNEL_PER_TOKEN", (9,))]
)
@pytest.mark.parametrize("older", [False, True])
def test_fp8(algorithm: str, shape: tuple[int, ...], older: bool) -> None:
    codes, scale = e4m3_bytes(1, 9, 20), scales(2, *shape)
    stored = {
        "weight": e4m3_tensor(codes),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.5),
    }
    found = read_hf_quant_config(content(algorithm)) if older else read_format(config(algorithm))
    matrix = matrix_of(found.scheme(MODULE), stored, 9, 20)
    assert_is(matrix, e4m3_numbers(codes) * numbers(scale).reshape(-1, 1))


def test_fp8_blocks_have_four_dimensions() -> None:
    codes, scale = e4m3_bytes(3, 256, 128), scales(4, 2, 1, 1, 1)
    stored = {"weight": e4m3_tensor(codes), "weight_scale": scale}
    matrix = matrix_of(read_format(config("fp8_pb_wo")).scheme(MODULE), stored, 256, 128)
    assert (matrix.rows, matrix.group) == (128, 128)
    assert_is(matrix, e4m3_numbers(codes) * spread(numbers(scale).reshape(2, 1), 128, 0))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_nvfp4_multiplies_with_the_second_scale(algorithm: str, older: bool) -> None:
    codes, scale_codes = draw(10, 0, 16, 6, 64), draw(11, 1, 127, 6, 4)
    stored = {
        "weight": halves(codes),
        "weight_scale": e4m3_tensor(scale_codes),
        "weight_scale_2": torch.tensor(0.0078125),
        "input_scale": torch.tensor(77.0),
    }
    options = {"group_size": 16}
    found = (
        read_hf_quant_config(content(algorithm, **options))
        if older
        else read_format(config(algorithm, **options))
    )
    matrix = matrix_of(found.scheme(MODULE), stored, 6, 64)
    assert_is(matrix, np.array(E2M1)[codes] * spread(e4m3_numbers(scale_codes), 16) * 0.0078125)


@pytest.mark.parametrize("older", [False, True])
def test_excluded_modules(older: bool) -> None:
    excluded = ["lm_head", "model.layers.0*", "*mlp.gate", "router"]
    found = (
        read_hf_quant_config(content("FP8", exclude_modules=excluded))
        if older
        else read_format(config("FP8", ignore=excluded))
    )
    for module in (
        *("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate"),
        *("model.layers.1.router", "model.embed_tokens"),
    ):
        assert found.scheme(module) is None, module
    for module in (MODULE, "model.layers.1.mlp.gate_proj", "model.layers.1.router_proj"):
        assert found.scheme(module) is not None, module


def test_schemes_of_single_modules() -> None:
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    found = read_hf_quant_config(content("MIXED_PRECISION", quantized_layers=layers))
    assert found.scheme("model.layers.0.self_attn.q_proj") is None
    up, down = (found.scheme(f"model.layers.0.mlp.{name}_proj") for name in ("up", "down"))
    assert up is not None and down is not None
    assert up.parts(8, 32)[0].types == ("F8_E4M3",) and down.parts(8, 32)[0].types == ("U8",)


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_scales_that_are_not_finite(part: str) -> None:
    stored = {
        "weight": torch.zeros(4, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
    }
    bad = torch.full_like(stored[part].float(), float("nan"))
    stored[part] = bad.to(stored[part].dtype)
    with pytest.raises(ValueError, match=f"^{part}: .* not finite"):
        matrix_of(read_format(config("NVFP4")).scheme(MODULE), stored, 4, 32)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("W4A16_AWQ", {}, "quant_algo='W4A16_AWQ' is not supported, 'FP8' or"),
        ("MXFP8", {}, "quant_algo='MXFP8'"),
        ("NVFP4", {"group_size": 32}, "group_size=32 is not supported, 16 is"),
        ("NVFP4", {"pre_quant_scale": True}, "pre_quant_scale=True"),
        ("FP8", {"has_zero_point": True}, "has_zero_point=True"),
        ("FP8", {"exclude_modules": "lm_head"}, "exclude_modules='lm_head'"),
        ("MIXED_PRECISION", {}, "quantized_layers=None"),
        ("MIXED_PRECISION", {"quantized_layers": {"a": 1}}, "quantized_layers.a=1"),
        (
            "MIXED_PRECISION",
            {"quantized_layers": {"a": {"quant_algo": "INT8"}}},
            "quantized_layers.a.quant_algo='INT8'",
        ),
    ],
)
def test_options_that_are_not_supported(
    algorithm: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_hf_quant_config(content(algorithm, **options))
    with pytest.raises(ValueError, match=message):
        read_format(config(algorithm, **options))
