"""config.json of XVERSE."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.llama_like import read_like


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("bias", "num_experts")
    return read_like(source, "LlamaForCausalLM")
