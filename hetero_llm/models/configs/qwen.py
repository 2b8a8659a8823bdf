"""config.json of QWen, the first one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader, torch_dtype
from hetero_llm.models.configs.common import base_fields, whole_heads_of, with_defaults
from hetero_llm.models.rope_config import RopeConfig, scaled_max_position

# Qwen-VL and Qwen-Audio have the same architecture and these besides.
_REFUSED = ("visual", "audio", "use_cache_quantization")
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QWenConfig(ModelConfig):
    """Attributes:
    logn_length: Queries at positions from here on are multiplied by the logarithm of their
        position (counted from 1) to this base; None: no query is.
    """

    logn_length: int | None


def read(source: ConfigSource) -> QWenConfig:
    source.refuse(*_REFUSED)
    reader = source.config
    if not reader.flag("scale_attn_weights", True):
        raise reader.bad("scale_attn_weights", f"not supported with {source.architecture}")
    hidden, heads, head_dim = whole_heads_of(reader, "num_attention_heads", "hidden_size")
    if reader.integer("kv_channels", 128) != head_dim:
        raise reader.bad("kv_channels", f"the heads have {head_dim} channels")
    both_halves = reader.integer("intermediate_size")
    if both_halves % 2:
        raise reader.bad("intermediate_size", "an even number is needed")
    seq_length = reader.integer("seq_length", 2048)
    rope, max_model_len = _rope(source, head_dim, seq_length)
    num_layers = reader.layers("num_hidden_layers")
    bias = not reader.flag("no_bias", True)
    fields = base_fields(
        source, hidden_size=hidden, num_heads=heads, head_dim=head_dim, num_layers=num_layers
    )
    return QWenConfig(
        **{**fields, "torch_dtype": _type(reader)},
        num_kv_heads=heads,
        intermediate_size=both_halves // 2,
        max_model_len=max_model_len,
        max_position_embeddings=seq_length,
        norm_eps=reader.number("layer_norm_epsilon", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=True,
        out_bias=bias,
        mlp_bias=bias,
        hidden_act="silu",
        logn_length=seq_length if reader.flag("use_logn_attn", True) else None,
    )


def _rope(source: ConfigSource, head_dim: int, seq_length: int) -> tuple[RopeConfig, int]:
    """The rotary embedding and the context in tokens, which exceeds `seq_length` for models with
    dynamic NTK or log-n attention."""
    reader = source.config
    source = with_defaults(source, {"rope_theta": reader.number("rotary_emb_base", 10000.0)})
    share = reader.number("rotary_pct", 1.0)
    rope = source.rope(head_dim, seq_length, rotary_factor=share)
    max_model_len = scaled_max_position(rope, seq_length)
    ntk, logn = reader.flag("use_dynamic_ntk", True), reader.flag("use_logn_attn", True)
    if source.rope_scaling is not None or not (ntk or logn):
        return rope, max_model_len
    if ntk:
        rope = dataclasses.replace(rope, scaling_type="qwen_ntk")
    return rope, max(max_model_len, reader.integer("max_position_embeddings", seq_length))


def _type(reader: Reader) -> str:
    """As stated, else by the flags, else what the models' own code takes on most devices."""
    if reader.raw.get("dtype") is not None or reader.raw.get("torch_dtype") is not None:
        return torch_dtype(reader)
    flagged = [name for key, name in _TYPES.items() if reader.flag(key, False)]
    return flagged[0] if flagged else "bfloat16"
