"""compressed-tensors: every layout of its compressors, and how groups find their modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
    scales,
    spread,
    words,
)

MODULE = "model.layers.3.mlp.up_proj"


def config(form: str, weights: dict[str, Any], **options: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **options,
    }


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("channel", (9, 1))])
def test_float_scales_of_the_matrix_or_of_rows(
    form: str, strategy: str, shape: tuple[int, ...]
) -> None:
    codes, scale = e4m3_bytes(1, 9, 20), scales(2, *shape, dtype=torch.bfloat16)
    stored = {
        "weight": e4m3_tensor(codes),
        "weight_scale": scale,
        "input_scale": torch.tensor([0.5]),
        "weight_zero_point": torch.zeros(shape).to(torch.float8_e4m3fn),
    }
    matrix = matrix_of(read_format(config(form, floats(strategy))).scheme(MODULE), stored, 9, 20)
    assert_is(matrix, e4m3_numbers(codes) * numbers(scale).reshape(-1, 1))


def test_float_blocks() -> None:
    codes, scale = e4m3_bytes(3, 200, 140), scales(4, 2, 2)
    stored = {"weight": e4m3_tensor(codes), "weight_scale": scale}
    weights = floats("block", block_structure=[128, 128])
    scheme = read_format(config("float-quantized", weights)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, 200, 140)
    assert matrix.rows == 128
    wide = spread(spread(numbers(scale), 128), 128, 0)[:200, :140]
    assert_is(matrix, e4m3_numbers(codes) * wide)


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("weights", "shape", "group"),
    [
        (integers(8, "tensor"), (1,), 24),
        (integers(8, "channel"), (9, 1), 24),
        (integers(8, "group", group_size=8), (9, 3), 8),
    ],
)
def test_int8(form: str, weights: dict[str, Any], shape: tuple[int, ...], group: int) -> None:
    values, scale = draw(5, -128, 128, 9, 24), scales(6, *shape, dtype=torch.float16)
    stored = {
        "weight": torch.from_numpy(values).to(torch.int8),
        "weight_scale": scale,
        "input_zero_point": torch.tensor([3], dtype=torch.int8),
        "input_scale": torch.tensor([0.5]),
        "weight_zero_point": torch.zeros(shape, dtype=torch.int8),
    }
    matrix = matrix_of(read_format(config(form, weights)).scheme(MODULE), stored, 9, 24)
    assert (matrix.kind, matrix.group) == ("int8", group)
    wide = numbers(scale).reshape(-1, 1) if group == 24 else spread(numbers(scale), 8)
    assert_is(matrix, values * wide)


def packed(
    bits: int, rows: int, columns: int, group: int, *, zeros: bool, seed: int = 7
) -> tuple[dict[str, Tensor], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Stored tensors, and codes and zero points [rows, columns] as signed numbers."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    values = draw(seed, low, high, rows, columns)
    zero = draw(seed + 1, low, high, rows, columns // group)
    scale = scales(seed + 2, rows, columns // group, dtype=torch.bfloat16)
    stored = {
        "weight_packed": words(values - low, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        stored["weight_zero_point"] = words((zero - low).T, bits).T.contiguous()
    return stored, values, spread(zero, group) if zeros else np.zeros_like(values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("weights", "columns", "group"),
    [
        ({"strategy": "group", "group_size": 16}, 48, 16),
        ({"strategy": "channel", "group_size": None}, 48, 48),
        ({"strategy": None, "group_size": -1}, 44, 44),
        ({"strategy": "group", "group_size": 2}, 42, 2),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_packed(bits: int, weights: dict[str, Any], columns: int, group: int, zeros: bool) -> None:
    """Rows and columns that do not fill the last word included."""
    arguments = {"num_bits": bits, "type": "int", "symmetric": not zeros, **weights}
    if bits == 8 and zeros:
        with pytest.raises(ValueError, match=r"symmetric=False is not supported"):
            read_format(config("pack-quantized", arguments))
        return
    stored, values, zero = packed(bits, 11, columns, group, zeros=zeros)
    scheme = read_format(config("pack-quantized", arguments)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, 11, columns)
    assert matrix.kind == f"int{bits}" and matrix.group == group
    assert_is(matrix, spread(numbers(stored["weight_scale"]), group) * (values - zero))


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_packed_in_another_order(bits: int, zeros: bool, actorder: str) -> None:
    """Column k belongs to group g_idx[k], wherever it stands."""
    stored, values, _ = packed(bits, 8, 64, 16, zeros=zeros)
    group_of = np.random.default_rng(9).permutation(np.repeat(np.arange(4), 16))
    stored["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    scale = numbers(stored["weight_scale"])[:, group_of]
    zero = 0
    if zeros:
        signed = draw(8, -8, 8, 8, 4)
        stored["weight_zero_point"] = words((signed + 8).T, 4).T.contiguous()
        zero = signed[:, group_of]
    weights = integers(bits, "group", group_size=16, actorder=actorder, symmetric=not zeros)
    matrix = matrix_of(read_format(config("pack-quantized", weights)).scheme(MODULE), stored, 8, 64)
    assert matrix.order is not None
    assert_is(matrix, scale * (values - zero))


def test_packed_in_order_has_no_order() -> None:
    stored, values, _ = packed(4, 8, 64, 16, zeros=False)
    weights = integers(4, "group", group_size=16, actorder="group")
    scheme = read_format(config("pack-quantized", weights)).scheme(MODULE)
    for group_of in (torch.arange(64) // 16, torch.full((64,), -1)):
        matrix = matrix_of(scheme, stored | {"weight_g_idx": group_of.int()}, 8, 64)
        assert matrix.order is None
        assert_is(matrix, spread(numbers(stored["weight_scale"]), 16) * values)


@pytest.mark.parametrize("strategy", ["tensor_group", "group"])
def test_nvfp4_divides_by_the_global_scale(strategy: str) -> None:
    codes, scale_codes = draw(10, 0, 16, 6, 64), draw(11, 1, 127, 6, 4)
    stored = {
        "weight_packed": halves(codes),
        "weight_scale": e4m3_tensor(scale_codes),
        "weight_global_scale": torch.tensor([2560.0]),
        "input_global_scale": torch.tensor([77.0]),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": 16}
    scheme = read_format(config("nvfp4-pack-quantized", weights)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, 6, 64)
    assert matrix.kind == "fp4" and matrix.scale.dtype == torch.float8_e4m3fn
    assert_is(matrix, np.array(E2M1)[codes] * spread(e4m3_numbers(scale_codes), 16) / 2560)


def test_mxfp4() -> None:
    codes, exponents = draw(12, 0, 16, 6, 64), draw(13, 0, 255, 6, 2)
    exponents[0, 0] = 0
    exponents[1, :] = 60, 200
    exponents = np.clip(exponents, 0, 250)
    stored = {
        "weight_packed": halves(codes),
        "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    scheme = read_format(config("mxfp4-pack-quantized", weights)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, 6, 64)
    assert_is(matrix, np.array(E2M1)[codes] * spread(2.0 ** (exponents - 127.0), 32))


def test_groups_find_their_modules() -> None:
    """A target that names a module goes before its class; a group may have a format of its own."""
    options = config("mixed-precision", {})
    options["config_groups"] = {
        "all": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": integers(8, "channel"),
        },
        "some": {
            "targets": [r"re:.*mlp\.(gate|up)_proj", "model.layers.0.self_attn.q_proj"],
            "format": "pack-quantized",
            "weights": integers(4, "group", group_size=32),
        },
        "cache": {"targets": ["LlamaAttention"], "weights": None},
    }
    options["ignore"] = ["lm_head", "re:.*router$"]
    found = read_format(options)

    def suffixes(module: str) -> set[str]:
        scheme = found.scheme(module)
        return set() if scheme is None else {part.suffix for part in scheme.parts(32, 64)}

    assert "weight_packed" in suffixes("model.layers.1.mlp.up_proj")
    assert "weight_packed" in suffixes("model.layers.0.self_attn.q_proj")
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        assert "weight_packed" not in suffixes(module) and "weight" in suffixes(module)
    assert not suffixes("lm_head") and not suffixes("model.layers.0.mlp.router")


def test_modules_that_no_target_names_are_plain() -> None:
    options = config("int-quantized", integers(8, "channel"))
    options["config_groups"]["group_0"]["targets"] = ["re:model.*"]
    found = read_format(options)
    assert found.scheme("vision.proj") is None and found.scheme(MODULE) is not None


@pytest.mark.parametrize(
    ("weights", "change", "message"),
    [
        ({}, {"weight_scale": (0, float("nan"))}, "weight_scale: 1 of 32 values are not finite"),
        ({}, {"weight_shape": (1, 63)}, r"weight_shape: \[8, 63\], its matrix is \[8, 64\]"),
        (
            {"actorder": "group"},
            {"weight_g_idx": (5, 4)},
            "weight_g_idx: names groups 0 to 4, .* 4",
        ),
        ({"actorder": "group"}, {"weight_g_idx": (5, -1)}, "weight_g_idx: names groups -1 to 3"),
        ({"actorder": "group"}, {"weight_g_idx": (5, 3)}, "groups have 15 to 17 columns, not 16"),
    ],
)
def test_values_that_cannot_be(
    weights: dict[str, Any], change: dict[str, tuple[int, float]], message: str
) -> None:
    stored, _, _ = packed(4, 8, 64, 16, zeros=False)
    if "actorder" in weights:
        stored["weight_g_idx"] = (torch.arange(64) // 16).int()
    for suffix, (place, value) in change.items():
        stored[suffix].view(-1)[place] = value
    arguments = integers(4, "group", group_size=16, **weights)
    scheme = read_format(config("pack-quantized", arguments)).scheme(MODULE)
    with pytest.raises(ValueError, match=message):
        matrix_of(scheme, stored, 8, 64)


def test_zero_points_of_symmetric_weights() -> None:
    scheme = read_format(config("int-quantized", integers(8, "channel"))).scheme(MODULE)
    stored = {
        "weight": torch.zeros(4, 4, dtype=torch.int8),
        "weight_scale": torch.ones(4, 1),
        "weight_zero_point": torch.ones(4, 1, dtype=torch.int8),
    }
    with pytest.raises(ValueError, match="weight_zero_point: not 0"):
        matrix_of(scheme, stored, 4, 4)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_global_scale_that_cannot_be(value: float) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    scheme = read_format(config("nvfp4-pack-quantized", weights)).scheme(MODULE)
    stored = {
        "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
        "weight_scale": torch.ones(4, 1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([value]),
    }
    with pytest.raises(ValueError, match="1 / weight_global_scale: 1 of 1 values are not finite"):
        matrix_of(scheme, stored, 4, 16)
    bad = torch.tensor([[127]] * 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="weight_scale: 4 of 4 values are not finite"):
        matrix_of(scheme, stored | {"weight_scale": bad}, 4, 16)


@pytest.mark.parametrize(
    ("form", "weights", "columns", "message"),
    [
        ("pack-quantized", integers(4, "group", group_size=48), 64, "groups of 48 .* 64 columns"),
        ("pack-quantized", integers(4, "channel"), 63, "groups of 63 columns, an odd number"),
        ("int-quantized", integers(8, "group", group_size=48), 64, "groups of 48 columns"),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            72,
            "groups of 16 columns do not divide its 72 columns",
        ),
    ],
)
def test_columns_that_groups_do_not_divide(
    form: str, weights: dict[str, Any], columns: int, message: str
) -> None:
    scheme = read_format(config(form, weights)).scheme(MODULE)
    assert scheme is not None
    with pytest.raises(ValueError, match=message):
        scheme.parts(8, columns)


@pytest.mark.parametrize(
    ("form", "weights", "options", "message"),
    [
        ("marlin-24", integers(4, "channel"), {}, "format='marlin-24' is not supported, 'float-q"),
        ("mxfp8-quantized", floats("group"), {}, "format='mxfp8-quantized'"),
        ("pack-quantized", integers(3, "channel"), {}, "weights.num_bits=3 .* 4 or 8 is"),
        ("pack-quantized", integers(4, "tensor"), {}, "weights.strategy='tensor'"),
        ("pack-quantized", integers(4, "group", group_size=0), {}, "weights.group_size=0"),
        ("pack-quantized", integers(4, "group"), {}, "weights.group_size=None"),
        ("pack-quantized", integers(4, "channel", actorder="row"), {}, "weights.actorder='row'"),
        ("pack-quantized", integers(4, "channel", dynamic=True), {}, "weights.dynamic=True"),
        ("int-quantized", floats("channel"), {}, "weights.type='float' is not supported, 'int'"),
        ("float-quantized", integers(8, "channel"), {}, "weights.type='int'"),
        ("int-quantized", integers(8, "channel", symmetric=False), {}, "weights.symmetric=False"),
        ("float-quantized", floats("block"), {}, "weights.block_structure=None"),
        ("float-quantized", floats("group"), {}, "weights.strategy='group'"),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "group_size": 32},
            {},
            "weights.group_size=32 is not supported, 16 is",
        ),
        (
            "int-quantized",
            integers(8, "channel"),
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format='sparse-24-bitmask'",
        ),
        (
            "int-quantized",
            integers(8, "channel"),
            {"transform_config": {"a": 1}},
            "transform_config",
        ),
        ("int-quantized", {}, {"config_groups": {}}, "config_groups={}"),
        ("int-quantized", {}, {"config_groups": []}, "config_groups"),
        ("int-quantized", {}, {"config_groups": {"W8A8": ["Linear"]}}, "config_groups.W8A8="),
        ("int-quantized", integers(8, "channel"), {"ignore": ["re:("]}, "ignore: .* no regular"),
    ],
)
def test_options_that_are_not_supported(
    form: str, weights: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(config(form, weights, **options))
