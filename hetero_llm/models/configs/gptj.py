"""config.json of GPT-J."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import LayerNormConfig, shape_fields
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    # transformers' class reads none of them; users may still scale the rotary embedding.
    source.refuse("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    shape = shape_fields(
        source,
        hidden=("n_embd", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )
    max_position = reader.integer("n_positions", 2048)
    head_dim = shape["head_dim"]
    rotary_dim = reader.integer("rotary_dim", 64)
    if "rotary_dim" in reader.raw and reader.raw["rotary_dim"] is None:
        raise reader.bad("rotary_dim", f"not supported with {source.architecture}")
    if rotary_dim % 2 or not 4 <= rotary_dim <= head_dim:
        raise reader.bad("rotary_dim", f"4, 6, ... up to the head size {head_dim} is needed")
    rope = replace(source.rope(head_dim, max_position), rotary_dim=rotary_dim)
    return LayerNormConfig(
        **shape,
        num_kv_heads=shape["num_heads"],
        intermediate_size=reader.integer("n_inner", 4 * shape["hidden_size"]),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=True,
        hidden_act=reader.activation("activation_function", "gelu_new"),
        parallel=True,
        shared_norm=True,
    )
