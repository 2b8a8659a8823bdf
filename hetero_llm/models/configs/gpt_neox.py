"""config.json of GPT-NeoX."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.layer_norm import LayerNormConfig, shape_fields
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    shape = shape_fields(source)
    max_position = reader.integer("max_position_embeddings")
    base = reader.raw.get("rotary_emb_base")
    if base is not None and reader.raw.get("rope_theta") is None:  # the former's new name
        source = replace(source, config=Reader({**reader.raw, "rope_theta": base}, reader.where))
    rope = source.rope(
        shape["head_dim"], max_position, rotary_factor=reader.number("rotary_pct", 0.25)
    )
    bias = reader.flag("attention_bias", True)
    return LayerNormConfig(
        **shape,
        num_kv_heads=shape["num_heads"],
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        hidden_act=reader.activation("hidden_act", "gelu"),
        parallel=reader.flag("use_parallel_residual", True),
    )
