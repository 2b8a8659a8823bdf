"""Which reader a method gets."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats.stored import read_quantize_config


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fp8", "fp8"),
        ("gptq", "gptq"),
        ("awq", "awq"),
        ("auto-round", "auto-round"),
        ("mxfp4", "mxfp4"),
        ("modelopt", "modelopt"),
        ("modelopt_fp4", "modelopt"),
        ("bitsandbytes", "bitsandbytes"),
    ],
)
def test_methods(method: str, name: str) -> None:
    options = {"bits": 4, "group_size": 16, "quant_algo": "NVFP4", "load_in_4bit": True}
    assert read_format({"quant_method": method, **options}).name == name


def test_the_key_of_newer_files() -> None:
    assert read_format({"method": "gptq", "bits": 4, "group_size": 128}).name == "gptq"


@pytest.mark.parametrize("method", ["aqlm", "squeezellm", "quip", "FP8", None, 4, ["fp8"]])
def test_methods_that_are_not_supported(method: Any) -> None:
    with pytest.raises(ValueError) as error:
        read_format({"quant_method": method})
    assert f"quant_method={method!r} is not supported, 'fp8' or" in str(error.value)


@pytest.mark.parametrize("config", ["fp8", [], None, 8])
def test_configs_that_are_no_objects(config: Any) -> None:
    with pytest.raises(ValueError, match="quantization_config=.* is not supported, an object is"):
        read_format(config)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"bits": 4, "group_size": 128}, "gptq"),
        ({"w_bit": 4, "q_group_size": 128}, "awq"),
        ({"bits": 4, "group_size": 128, "quant_method": "awq"}, "awq"),
        ({"bits": 4, "group_size": 128, "method": "gptq"}, "gptq"),
    ],
)
def test_older_files(content: dict[str, Any], name: str) -> None:
    assert read_quantize_config(content).name == name
