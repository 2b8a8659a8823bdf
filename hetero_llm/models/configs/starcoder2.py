"""config.json of StarCoder2."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.layer_norm import LayerNormConfig, kv_heads_of, shape_fields
from hetero_llm.models.rope_config import scaled_max_position


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    for key, computed in (("mlp_type", "default"), ("norm_type", "layer_norm")):
        if reader.raw.get(key) not in (None, computed):
            raise reader.bad(key, f"not supported with {source.architecture}")
    shape = shape_fields(source, free_head_dim=True)
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(shape["head_dim"], max_position)
    if rope.rotary_dim != shape["head_dim"]:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    window = None
    if reader.raw.get("sliding_window") is not None:
        window = reader.integer("sliding_window")
    shape["sliding_windows"], max_model_len = source.served_windows(
        (window,) * shape["num_layers"], scaled_max_position(rope, max_position)
    )
    bias = reader.flag("use_bias", True)
    return LayerNormConfig(
        **shape,
        # transformers' default is the number of one particular model.
        num_kv_heads=kv_heads_of(reader, shape["num_heads"], None),
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=max_model_len,
        max_position_embeddings=max_position,
        norm_eps=reader.number("norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        hidden_act=reader.activation("hidden_act", "gelu_pytorch_tanh"),
    )
