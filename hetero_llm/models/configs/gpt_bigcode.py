"""config.json of GPTBigCode (SantaCoder, StarCoder)."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import LayerNormConfig, shape_fields


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    source.refuse("add_cross_attention")
    shape = shape_fields(
        source,
        hidden=("n_embd", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )
    if not reader.flag("scale_attn_weights", True):
        shape["attn_scale"] = 1.0
    max_position = reader.integer("n_positions")
    return LayerNormConfig(
        **shape,
        num_kv_heads=1 if reader.flag("multi_query", True) else shape["num_heads"],
        intermediate_size=reader.integer("n_inner", 4 * shape["hidden_size"]),
        max_model_len=max_position,
        max_position_embeddings=max_position,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        hidden_act=reader.activation("activation_function", "gelu_pytorch_tanh"),
    )
