"""AutoRound's config over the packings of GPTQ and AWQ."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats import test_awq, test_gptq
from tests.quantization.formats.stored import assert_is, matrix_of

MODULE = "model.layers.3.mlp.up_proj"


def config(**options: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 16,
        "sym": True,
        "data_type": "int",
        **options,
    }


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_the_packing_of_gptq(method: str) -> None:
    stored, expected = test_gptq.packed()
    del stored["g_idx"]
    scheme = read_format(config(quant_method=method)).scheme(MODULE)
    assert_is(matrix_of(scheme, stored, 24, 64), expected)


def test_the_packing_of_awq() -> None:
    stored, expected = test_awq.packed()
    scheme = read_format(config(packing_format="auto_round:auto_awq", sym=False)).scheme(MODULE)
    assert_is(matrix_of(scheme, stored, 24, 64), expected)


def test_options_of_single_modules() -> None:
    found = read_format(
        config(
            extra_config={
                "model.layers.0.mlp.up_proj": {"bits": 16},
                "lm_head": {"bits": 8, "group_size": 32},
                r".*\.self_attn\..*": {"bits": 8},
            },
            block_name_to_quantize="model.layers,model.other",
        )
    )
    for module in ("model.layers.0.mlp.up_proj", "vision.blocks.0.proj"):
        assert found.scheme(module) is None
    for module, height in (
        *(("lm_head", 16), ("model.layers.1.self_attn.q_proj", 16)),
        *((MODULE, 8), ("model.other.0.proj", 8)),
    ):
        scheme = found.scheme(module)
        assert scheme is not None
        assert scheme.parts(24, 64)[0].shapes == ((height, 24),), module


def test_the_head_is_plain() -> None:
    assert read_format(config()).scheme("lm_head") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing_format": "auto_round:gguf"}, "packing_format='auto_round:gguf'"),
        ({"bits": 16}, "bits=16 is not supported, 4 or 8 is"),
        ({"bits": 2}, "bits=2"),
        ({"data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({"extra_config": {"a": {"bits": 3}}}, "bits=3"),
        ({"extra_config": {"a": 3}}, "extra_config.a=3"),
        ({"extra_config": {"(": {}}}, "extra_config: '.' is no regular expression"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize=3"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(config(**options))
