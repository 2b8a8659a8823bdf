"""config.json of Baichuan and Baichuan2."""

from __future__ import annotations

import dataclasses

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import alibi_slopes
from hetero_llm.models.configs.llama_like import read_like, with_defaults

_ROTARY_HIDDEN_SIZE = 4096


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed.

    Nothing in the file says whether positions are rotary or ALiBi. As in vLLM: the models of 7B
    rotate (Baichuan 1's architecture has a capital C, Baichuan2's is told by its size), those of
    13B do not.
    """
    source.refuse("attention_bias", "mlp_bias", "num_key_value_heads")
    reader = source.config
    if reader.raw.get("model_max_length") is not None:
        length = reader.integer("model_max_length")
        source = with_defaults(source, {"max_position_embeddings": length})
    rotary = (
        source.architecture == "BaiChuanForCausalLM"
        or reader.integer("hidden_size") == _ROTARY_HIDDEN_SIZE
    )
    if not rotary:
        source.refuse("rope_theta", "rope_scaling", "rope_parameters")
    config = read_like(source, "LlamaForCausalLM")
    if rotary:
        return config
    return dataclasses.replace(config, rope=None, alibi_slopes=alibi_slopes(config.num_heads))
