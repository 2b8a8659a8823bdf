"""config.json of StableLM, and of its first releases (StableLMEpochForCausalLM)."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import (
    LayerNormConfig,
    first_key,
    kv_heads_of,
    rotary_share,
    shape_fields,
)
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    shape = shape_fields(source)
    max_position = reader.integer("max_position_embeddings")
    share = rotary_share(reader, "rope_pct")
    rope = source.rope(shape["head_dim"], max_position, rotary_factor=share or 0.25)
    parallel = reader.flag("use_parallel_residual", False)
    return LayerNormConfig(
        **shape,
        # transformers' default is the number of one particular model.
        num_kv_heads=kv_heads_of(reader, shape["num_heads"], None),
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        norm_eps=reader.number(first_key(reader, ("layer_norm_eps", "norm_eps")), 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=reader.flag("use_qkv_bias", False),
        out_bias=False,
        mlp_bias=False,
        hidden_act=reader.activation("hidden_act", "silu"),
        parallel=parallel,
        shared_norm=parallel,
        qk_layer_norm=reader.flag("qk_layernorm", False),
    )
