"""What configs say of a quantized KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.quantization.formats.kv_cache import has_kv_scales

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
