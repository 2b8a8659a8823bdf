"""config.json of Falcon, and of its first releases (RWForCausalLM, "RefinedWeb")."""

from __future__ import annotations

import struct

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.common import alibi_slopes, position_fields
from hetero_llm.models.configs.layer_norm import (
    LayerNormConfig,
    all_biases,
    first_key,
    shape_fields,
)


def read(source: ConfigSource) -> ModelConfig:
    reader = source.config
    source.refuse("apply_residual_connection_post_layernorm")
    shape = shape_fields(
        source,
        hidden=("n_embed", "hidden_size"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
    )
    hidden, heads, head_dim = shape["hidden_size"], shape["num_heads"], shape["head_dim"]
    newer = source.architecture == "FalconForCausalLM"
    # Of the first releases only 40B states its KV heads; it has no key for its architecture.
    grouped = reader.flag(
        "new_decoder_architecture", not newer and reader.raw.get("n_head_kv") is not None
    )
    parallel = reader.flag("parallel_attn", newer)
    norms = reader.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if grouped and not parallel:
        raise reader.bad("parallel_attn", "not supported with new_decoder_architecture")
    if norms > (2 if grouped else 1):
        raise reader.bad("num_ln_in_parallel_attn", "not supported with this architecture")
    alibi = reader.flag("alibi", False)
    max_position = reader.integer("max_position_embeddings", 2048)
    rope = None if alibi else source.rope(head_dim, max_position)
    if rope is not None and rope.rotary_dim != head_dim:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    shape["num_kv_heads"] = _kv_heads(source, heads, grouped, newer)
    return LayerNormConfig(
        **shape,
        **position_fields(rope, max_position),
        **all_biases(reader.flag("bias", False)),
        intermediate_size=reader.integer("ffn_hidden_size", 4 * hidden),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        hidden_act=reader.activation("activation", "gelu"),
        alibi_slopes=_slopes(heads, head_dim) if alibi else None,
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )


def _kv_heads(source: ConfigSource, heads: int, grouped: bool, newer: bool) -> int:
    reader = source.config
    key = first_key(reader, ("num_kv_heads", "n_head_kv"))
    if not grouped and reader.flag("multi_query", newer):
        return 1  # num_kv_heads is not read then
    kv_heads = reader.integer(key, heads)
    if heads % kv_heads or (not grouped and kv_heads != heads):
        raise reader.bad(key, f"not supported with {heads} attention heads in this architecture")
    return kv_heads


def _slopes(heads: int, head_dim: int) -> tuple[float, ...]:
    """Falcon rounds the slopes to bfloat16, and adds the bias before it scales the scores."""
    return tuple(rounded_to_bfloat16(slope) * head_dim**-0.5 for slope in alibi_slopes(heads))


def rounded_to_bfloat16(value: float) -> float:
    """The nearest bfloat16, even on ties."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]
