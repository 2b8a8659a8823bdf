"""config.json of GLM-4 in transformers' format; `chatglm.py` reads that of its remote code."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.common import llama_fields, with_defaults

_ROTATED = {"partial_rotary_factor": 0.5}
_NORM_EPS = 1.5625e-7


def read(source: ConfigSource) -> ModelConfig:
    """GLM-4 and GLM-4-0414."""
    source.refuse("mlp_bias", "sliding_window", "layer_types", "num_local_experts")
    source = with_defaults(source, _ROTATED)
    reader = source.config
    return ModelConfig(
        **llama_fields(
            source,
            (None,) * reader.layers("num_hidden_layers"),
            norm_eps=_NORM_EPS,
            needs_kv_heads=True,
            default_head_dim=128,
            partial_rotary=True,
        ),
        qkv_bias=reader.flag("attention_bias", True),
    )
