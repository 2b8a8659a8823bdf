"""config.json of Phi (1, 1.5 and 2)."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import LayerNormConfig, kv_heads_of, shape_fields
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    shape = shape_fields(source, free_head_dim=True)
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(shape["head_dim"], max_position, rotary_factor=0.5)
    return LayerNormConfig(
        **shape,
        num_kv_heads=kv_heads_of(reader, shape["num_heads"], shape["num_heads"]),
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        hidden_act=reader.activation("hidden_act", "gelu_new"),
        parallel=True,
        shared_norm=True,
        qk_layer_norm=reader.flag("qk_layernorm", False),
    )
