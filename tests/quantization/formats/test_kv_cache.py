"""What configs say of a quantized KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.quantization.formats.kv_cache import has_kv_scales, kv_scale_of

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_scheme": FP8}, True),
        ({"kv_cache_scheme": FP8 | {"strategy": "attn_head"}}, True),
        ({"kv_cache_scheme": FP8 | {"dynamic": True}}, False),
        ({"kv_cache_scheme": "static"}, True),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"quantization": {"kv_cache_quant_algo": None}}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
    ],
)
def test_scales(config: dict[str, Any], expected: bool) -> None:
    assert has_kv_scales(config) is expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_cache_scheme": FP8 | {"num_bits": 4}}, "kv_cache_scheme.num_bits=4"),
        ({"kv_cache_scheme": FP8 | {"type": "int"}}, "kv_cache_scheme.type='int'"),
        ({"kv_cache_scheme": FP8 | {"symmetric": False}}, "kv_cache_scheme.symmetric=False"),
        ({"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme='NVFP4'"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo='NVFP4'"),
    ],
)
def test_other_caches(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        has_kv_scales(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.k_scale", (3, "k")),
        ("transformer.h.11.attn.v_proj.v_scale", (11, "v")),
        ("model.layers.0.self_attn.k_proj.output_scale", (0, "k")),
        ("model.layers.0.self_attn.q_proj.output_scale", (0, "q")),
        ("model.layers.0.self_attn.kv_scale", (0, "kv")),
        ("model.layers.0.self_attn.o_proj.output_scale", None),
        ("model.layers.0.self_attn.k_proj.weight_scale", None),
        ("model.layers.0.mlp.down_proj.input_scale", None),
        ("k_scale", None),
        ("model.layers.9999999999.self_attn.k_scale", None),
    ],
)
def test_names(name: str, expected: tuple[int, str] | None) -> None:
    assert kv_scale_of(name) == expected
