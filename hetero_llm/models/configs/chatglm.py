"""config.json of ChatGLM2, ChatGLM3 and GLM-4 in their remote code's format."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import MOST_HEADS, ConfigSource, Reader
from hetero_llm.models.configs.common import base_fields, position_fields, with_defaults

_REFUSED = (
    "apply_residual_connection_post_layernorm",
    "fp32_residual_connection",
    "position_encoding_2d",  # the first ChatGLM, another model
    "pre_seq_len",
    "prefix_projection",
    "quantization_bit",
    "vision_config",
)
_NEEDED = ("rmsnorm", "post_layer_norm")
_BASE = 10000.0


def read(source: ConfigSource) -> ModelConfig:
    """`rope_ratio` multiplies the base of the rotary embedding, as in ChatGLM3, GLM-4 and vLLM."""
    _refuse(source)
    reader = source.config
    heads, groups = _heads(reader)
    head_dim = reader.integer("kv_channels", 128)
    max_position = reader.integer("seq_length", 2048)
    theta = _BASE * reader.number("rope_ratio", 1.0)
    source = with_defaults(source, {"rope_theta": theta})
    bias = reader.flag("add_bias_linear", False)
    return ModelConfig(
        **base_fields(
            source,
            hidden_size=reader.integer("hidden_size"),
            num_heads=heads,
            head_dim=head_dim,
            num_layers=reader.layers("num_layers"),
            vocab_key="padded_vocab_size",
        ),
        **position_fields(source.rope(head_dim, max_position, rotary_factor=0.5), max_position),
        num_kv_heads=groups,
        intermediate_size=reader.integer("ffn_hidden_size"),
        norm_eps=reader.number("layernorm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias or reader.flag("add_qkv_bias", False),
        out_bias=bias,
        mlp_bias=bias,
        hidden_act="silu",
    )


def _refuse(source: ConfigSource) -> None:
    source.refuse(*(key for key in _REFUSED if source.config.raw.get(key) != 0))
    for key in _NEEDED:
        if not source.config.flag(key, True):
            raise source.config.bad(key, f"not supported with {source.architecture}")


def _heads(reader: Reader) -> tuple[int, int]:
    """Number of heads, and of KV heads."""
    heads = reader.integer("num_attention_heads", most=MOST_HEADS)
    if not reader.flag("multi_query_attention", False):
        return heads, heads
    groups = reader.integer("multi_query_group_num", 1)
    if heads % groups:
        raise reader.bad("multi_query_group_num", f"does not divide num_attention_heads={heads}")
    return heads, groups
