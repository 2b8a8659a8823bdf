"""config.json of Nemotron (Nemotron-3, Nemotron-4, Minitron)."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import (
    LayerNormConfig,
    kv_heads_of,
    rotary_share,
    shape_fields,
)
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    shape = shape_fields(source, free_head_dim=True)
    max_position = reader.integer("max_position_embeddings")
    share = rotary_share(reader, "rope_percent", "rope_percentage")
    rope = source.rope(shape["head_dim"], max_position, rotary_factor=share or 0.5)
    attention_bias, mlp_bias = reader.flag("attention_bias", False), reader.flag("mlp_bias", False)
    return LayerNormConfig(
        **shape,
        num_kv_heads=kv_heads_of(reader, shape["num_heads"], shape["num_heads"]),
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        norm_eps=reader.number("norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        hidden_act=reader.activation("hidden_act", "relu2"),
    )
