"""config.json of ChatGLM2, ChatGLM3 and GLM-4 in their remote code's format."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader, eos_and_bos, torch_dtype
from hetero_llm.models.configs.llama_like import with_defaults
from hetero_llm.models.rope_config import scaled_max_position

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
    """Raises ModelLoadError: a key is wrong or asks for what is not computed.

    `rope_ratio` multiplies the base of the rotary embedding, as in ChatGLM3, GLM-4 and vLLM.
    """
    _refuse(source)
    reader = source.config
    heads, groups = _heads(reader)
    head_dim = reader.integer("kv_channels", 128)
    max_position = reader.integer("seq_length", 2048)
    theta = _BASE * reader.number("rope_ratio", 1.0)
    source = with_defaults(source, {"rope_theta": theta})
    rope = source.rope(head_dim, max_position, rotary_factor=0.5)
    num_layers = reader.integer("num_layers")
    bias = reader.flag("add_bias_linear", False)
    eos, bos = eos_and_bos(reader, source.generation)
    hidden = reader.integer("hidden_size")
    return ModelConfig(
        architecture=source.architecture,
        model_type=str(reader.raw.get("model_type", "")),
        vocab_size=reader.integer("padded_vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        intermediate_size=reader.integer("ffn_hidden_size"),
        max_model_len=scaled_max_position(rope, max_position),
        max_position_embeddings=max_position,
        torch_dtype=torch_dtype(reader),
        norm_eps=reader.number("layernorm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=bias or reader.flag("add_qkv_bias", False),
        out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        hidden_act="silu",
        sliding_windows=(None,) * num_layers,
        attn_scale=head_dim**-0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
    )


def _refuse(source: ConfigSource) -> None:
    source.refuse(*(key for key in _REFUSED if source.config.raw.get(key) != 0))
    for key in _NEEDED:
        if not source.config.flag(key, True):
            raise source.config.bad(key, f"not supported with {source.architecture}")


def _heads(reader: Reader) -> tuple[int, int]:
    """Heads, and KV heads."""
    heads = reader.integer("num_attention_heads")
    if not reader.flag("multi_query_attention", False):
        return heads, heads
    groups = reader.integer("multi_query_group_num", 1)
    if heads % groups:
        raise reader.bad("multi_query_group_num", f"does not divide num_attention_heads={heads}")
    return heads, groups
