"""Arguments about adapters."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, LoraConfig
from hetero_llm.core.errors import ConfigError


def config_of(**args: Any) -> LoraConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": "demo", **args})).lora


def test_defaults() -> None:
    assert config_of() == LoraConfig()
    assert config_of(enable_lora=True) == LoraConfig(enabled=True)


def test_values() -> None:
    config = config_of(
        enable_lora=True, max_loras=4, max_cpu_loras=100, max_lora_rank=64, lora_dtype="bfloat16"
    )
    assert config == LoraConfig(True, 4, 100, 64, "bfloat16")
    assert config_of(enable_lora=True, max_loras=4).max_cpu_loras == 4
    assert config_of(lora_merge="/a").merge == "/a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_loras", 0),
        ("max_lora_rank", 0),
        ("max_lora_rank", 513),
        ("max_cpu_loras", 0),
        ("lora_dtype", "int8"),
        ("long_lora_scaling_factors", "4.0"),
        ("lora_extra_vocab_size", 8),
        ("enable_lora_bias", True),
    ],
)
def test_values_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        config_of(enable_lora=True, **{name: value})


def test_host_memory_holds_at_least_what_the_device_holds() -> None:
    with pytest.raises(ConfigError, match=r"max_cpu_loras=2: must be at least max_loras \(3\)"):
        config_of(enable_lora=True, max_loras=3, max_cpu_loras=2)


def test_arguments_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_of(max_loras=4, max_lora_rank=64)
    assert "max_loras, max_lora_rank: no effect without enable_lora" in caplog.text
