"""config.json of PhiMoE (Phi-3.5-MoE), by transformers' own class and by its remote code."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.mixtral import (
    MixtralConfig,
    common_fields,
    expert_fields,
    with_default_theta,
)

_DEFAULT_THETA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiMoEConfig(MixtralConfig):
    """Of a mixture of experts.

    Attributes:
        router_jitter: See `experts.sparse_mixer`.
        head_bias: The head has one.
    """

    router_jitter: float
    head_bias: bool


def read(source: ConfigSource) -> PhiMoEConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source = with_default_theta(source, _DEFAULT_THETA)
    reader = source.config
    experts = expert_fields(reader, "num_local_experts", "intermediate_size", 2)
    if experts["experts_per_token"] != 2:
        raise reader.bad("num_experts_per_tok", "this router chooses 2")
    jitter = reader.raw.get("router_jitter_noise", 0.01)
    if not isinstance(jitter, (int, float)) or isinstance(jitter, bool) or jitter < 0:
        raise reader.bad("router_jitter_noise", "a number from 0 on is needed")
    num_layers = reader.integer("num_hidden_layers")
    window = None
    if reader.raw.get("sliding_window") is not None:
        window = reader.integer("sliding_window")
    bias = reader.flag("attention_bias", False)
    return PhiMoEConfig(
        **common_fields(source, (window,) * num_layers, norm_eps=1e-5),
        **experts,
        qkv_bias=bias,
        out_bias=bias,
        router_jitter=float(jitter),
        head_bias=reader.flag("lm_head_bias", False),
    )
