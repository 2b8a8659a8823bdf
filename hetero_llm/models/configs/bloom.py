"""config.json of BLOOM."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import (
    LayerNormConfig,
    alibi_slopes,
    first_key,
    shape_fields,
)


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    source.refuse("apply_residual_connection_post_layernorm")
    if reader.flag("slow_but_exact", False) and reader.integer("pretraining_tp", 1) > 1:
        raise reader.bad("slow_but_exact", f"not supported with {source.architecture}")
    shape = shape_fields(
        source,
        hidden=("n_embed", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )
    inner = 4 * shape["hidden_size"]
    if reader.integer("n_inner", inner) != inner:
        raise reader.bad("n_inner", f"{source.architecture} has {inner}")
    # ALiBi has no last position; without a key it is that of every released model's training.
    length = first_key(reader, ("max_position_embeddings", "seq_length", "n_positions"))
    max_position = reader.integer(length, 2048)
    return LayerNormConfig(
        **shape,
        num_kv_heads=shape["num_heads"],
        intermediate_size=inner,
        max_model_len=max_position,
        max_position_embeddings=max_position,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        hidden_act="gelu_pytorch_tanh",
        alibi_slopes=alibi_slopes(shape["num_heads"]),
    )
