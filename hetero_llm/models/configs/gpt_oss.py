"""config.json of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_llm.models.config import ClampedSwish
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.common import (
    alternating_windows,
    llama_fields,
    with_config,
    with_rope_theta,
)
from hetero_llm.models.configs.mixture import MixtralConfig

_ROPE_THETA = 150000.0
_HEAD_DIM = 64
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MixtralConfig):
    """`gate`: Of the experts."""

    gate: ClampedSwish


def read(source: ConfigSource) -> GptOssConfig:
    """Defaults are those of transformers' class, but for sizes that are one model's."""
    source.refuse("mlp_bias")
    source = _with_rope(_with_dtype(source))
    reader = source.config
    if reader.raw.get("hidden_act", "silu") != "silu":
        raise reader.bad("hidden_act", "the experts' activation is fixed, and called silu")
    windows = alternating_windows(reader, reader.layers("num_hidden_layers"), 128)
    num_experts = reader.integer("num_local_experts")
    k = reader.integer("num_experts_per_tok", 4)
    if k > num_experts:
        raise reader.bad("num_experts_per_tok", f"there are {num_experts} experts")
    bias = reader.flag("attention_bias", True)
    fields: dict[str, Any] = llama_fields(
        source, windows, norm_eps=1e-5, needs_kv_heads=True, default_head_dim=_HEAD_DIM
    )
    return GptOssConfig(
        **fields,
        qkv_bias=bias,
        out_bias=bias,
        attn_sinks=True,
        num_experts=num_experts,
        experts_per_token=k,
        expert_size=reader.integer("intermediate_size"),
        gate=ClampedSwish(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0)),
    )


def _with_dtype(source: ConfigSource) -> ConfigSource:
    """The published files do not name the type of the weights that are no MXFP4."""
    raw = source.config.raw
    named = raw.get("dtype") is not None or raw.get("torch_dtype") is not None
    return source if named else with_config(source, {**raw, "dtype": "bfloat16"})


def _with_rope(source: ConfigSource) -> ConfigSource:
    raw = source.config.raw
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        source = with_config(source, {**raw, "rope_parameters": _ROPE})
    return with_rope_theta(source, _ROPE_THETA)
