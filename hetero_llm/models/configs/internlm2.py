"""config.json of InternLM2."""

from __future__ import annotations

import dataclasses

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.llama_like import read_like


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("attention_bias", "mlp_bias")
    bias = source.config.flag("bias", True)
    config = read_like(source, "LlamaForCausalLM")
    return dataclasses.replace(config, qkv_bias=bias, out_bias=bias)
