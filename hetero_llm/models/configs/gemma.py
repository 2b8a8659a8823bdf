"""config.json of Gemma."""

from __future__ import annotations

import dataclasses

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.llama_like import read_like, with_defaults

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
"""Of absent keys, in Gemma's and Gemma2's classes."""
_TANH = "gelu_pytorch_tanh"


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("use_bidirectional_attention", "mlp_bias")
    source.config.integer("num_key_value_heads")  # the class' default is one model's size
    config = read_like(with_defaults(source, DEFAULTS), "LlamaForCausalLM")
    return dataclasses.replace(config, hidden_act=_activation(source.config))


def _activation(reader: Reader) -> str:
    """The first releases say "gelu" and mean its tanh approximation, as transformers knows; some
    files name it under `hidden_activation` too."""
    keys = [k for k in ("hidden_activation", "hidden_act") if reader.raw.get(k) is not None]
    names = [reader.activation(key, _TANH).replace("gelu_pytorch_tanh", "gelu") for key in keys]
    if len(set(names)) > 1:
        raise reader.bad("hidden_activation", "differs from hidden_act")
    return _TANH if not names or names[0] == "gelu" else names[0]
