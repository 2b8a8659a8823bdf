"""What names of load formats, types and ways to quantize become in the configuration."""

from __future__ import annotations

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError

LOAD_FORMATS = {
    "auto": "auto", "pt": "pt", "safetensors": "safetensors", "npcache": "pt", "dummy": "dummy",
    "gguf": "gguf", "bitsandbytes": "auto", "hf": "auto", "fastsafetensors": "safetensors",
    "runai_streamer": "safetensors", "instanttensor": "safetensors",
}  # fmt: skip
"""Of TACO-LLM's manual and of vLLM, and what they read."""


def configured(**arguments: object) -> EngineConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": "demo", **arguments}))


@pytest.mark.parametrize("name", LOAD_FORMATS)
def test_load_formats(name: str) -> None:
    load = configured(load_format=name).load
    assert load.load_format == LOAD_FORMATS[name]
    assert load.quantization == ("bitsandbytes" if name == "bitsandbytes" else None)


@pytest.mark.parametrize(
    "name", ["tensorizer", "sharded_state", "mistral", "runai_streamer_sharded"]
)
def test_load_formats_that_are_not_there_yet(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^load_format='{name}': is not available yet; use "):
        configured(load_format=name)


def test_the_bitsandbytes_load_format_quantizes() -> None:
    both = configured(load_format="bitsandbytes", quantization="bitsandbytes").load
    assert (both.load_format, both.quantization) == ("auto", "bitsandbytes")
    with pytest.raises(ConfigError, match="^load_format='bitsandbytes': needs .*, not 'awq'"):
        configured(load_format="bitsandbytes", quantization="awq")


@pytest.mark.parametrize(
    ("given", "name"), [("vllm", "native"), ("native", "native"), ("auto", "auto")]
)
def test_vllms_name_of_our_own_models(given: str, name: str) -> None:
    assert configured(model_impl=given).load.model_impl == name
