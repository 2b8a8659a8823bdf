"""config.json of the mixtures of experts: Mixtral, PhiMoE, Qwen2-MoE, Qwen3-MoE and MiniMax-M2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.common import (
    Windows,
    further_layers,
    llama_fields,
    max_window_layers,
    same_window,
    windows_of_layer_types,
    with_defaults,
    with_rope_theta,
)

_MIXTRAL_ROPE_THETA = 1e6  # PhiMoE's, too
_MINIMAX_M2_ROPE_THETA = 5e6
_MINIMAX_M2_ARITHMETIC = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    """A mixture of experts.

    Attributes:
        num_experts: In each layer that has experts.
        experts_per_token: How many of them each token uses.
        expert_size: Inner size of one expert.
        further_layers: See `common.further_layers`.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    further_layers: int = 0

    @property
    def router_sizes(self) -> tuple[int, int, int]:
        """What a router is made of: hidden size, experts, experts of a token."""
        return self.hidden_size, self.num_experts, self.experts_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiMoEConfig(MixtralConfig):
    """`router_jitter`: See `experts.sparse_mixer`."""

    router_jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(MixtralConfig):
    """`intermediate_size` is that of the layers without experts.

    Attributes:
        sparse_layers: Which layers have experts.
        renormalize: The weights of a token's experts add up to one.
    """

    sparse_layers: tuple[bool, ...]
    renormalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """`shared_expert_size`: Inner size of the experts that every token uses, together."""

    shared_expert_size: int


def read(source: ConfigSource) -> MixtralConfig:
    """Mixtral."""
    source.refuse("attention_bias")
    source = with_rope_theta(source, _MIXTRAL_ROPE_THETA)
    reader = source.config
    windows = same_window(reader, reader.layers("num_hidden_layers"))
    return MixtralConfig(
        **_fields(source, windows, norm_eps=1e-5),
        **expert_fields(reader, "num_local_experts", "intermediate_size", 2),
    )


def read_phimoe(source: ConfigSource) -> PhiMoEConfig:
    """PhiMoE, by transformers' own class and by its remote code."""
    source = with_rope_theta(source, _MIXTRAL_ROPE_THETA)
    reader = source.config
    experts = expert_fields(reader, "num_local_experts", "intermediate_size", 2)
    if experts["experts_per_token"] != 2:
        raise reader.bad("num_experts_per_tok", "this router chooses 2")
    jitter = reader.raw.get("router_jitter_noise", 0.01)
    if not isinstance(jitter, (int, float)) or isinstance(jitter, bool) or jitter < 0:
        raise reader.bad("router_jitter_noise", "a number from 0 on is needed")
    windows = same_window(reader, reader.layers("num_hidden_layers"))
    bias = reader.flag("attention_bias", False)
    return PhiMoEConfig(
        **_fields(source, windows, norm_eps=1e-5),
        **experts,
        qkv_bias=bias,
        out_bias=bias,
        router_jitter=float(jitter),
        head_bias=reader.flag("lm_head_bias", False),
    )


def read_qwen2_moe(source: ConfigSource) -> Qwen2MoeConfig:
    """Qwen2-MoE."""
    source.refuse("attention_bias")
    reader = source.config
    num_layers = reader.layers("num_hidden_layers")
    return Qwen2MoeConfig(
        **_fields(source, _windows(reader, num_layers), norm_eps=1e-6),
        **expert_fields(reader, "num_experts", "moe_intermediate_size", 4),
        qkv_bias=reader.flag("qkv_bias", True),
        sparse_layers=_sparse_layers(reader, num_layers),
        shared_expert_size=reader.integer("shared_expert_intermediate_size"),
        renormalize=reader.flag("norm_topk_prob", False),
    )


def read_qwen3_moe(source: ConfigSource) -> Qwen3MoeConfig:
    """Qwen3-MoE. As in transformers' class all layers have the window, or none."""
    reader = source.config
    num_layers = reader.layers("num_hidden_layers")
    null = "sliding_window" in reader.raw and reader.raw["sliding_window"] is None
    window = None
    if not null and reader.flag("use_sliding_window", False):
        window = reader.integer("sliding_window", 4096)
    windows = (window,) * num_layers
    if reader.raw.get("layer_types") is not None:
        needs = "use_sliding_window"
        if windows_of_layer_types(reader, num_layers, window, needs=needs) != windows:
            reason = f"mixed layers are not supported with {source.architecture}"
            raise reader.bad("layer_types", reason)
    bias = reader.flag("attention_bias", False)
    return Qwen3MoeConfig(
        **_fields(source, windows, norm_eps=1e-6),
        **expert_fields(reader, _qwen3_count_key(reader), "moe_intermediate_size", 8),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        sparse_layers=_sparse_layers(reader, num_layers),
        renormalize=reader.flag("norm_topk_prob", False),
    )


def read_minimax_m2(source: ConfigSource) -> MixtralConfig:
    """MiniMax-M2, by transformers' own class and by its remote code."""
    source.refuse("attention_bias", "sliding_window", "shared_intermediate_size")
    reader = source.config
    for key, value in _MINIMAX_M2_ARITHMETIC.items():
        if reader.raw.get(key, value) != value:
            raise reader.bad(key, f"not supported with {source.architecture}")
    types = reader.raw.get("attn_type_list")
    if types is not None and (not isinstance(types, list) or set(map(str, types)) - {"1"}):
        raise reader.bad("attn_type_list", f"not supported with {source.architecture}")
    if reader.raw.get("rotary_dim") is not None:
        share = reader.integer("rotary_dim") / reader.integer("head_dim", 128)
        source = with_defaults(source, {"partial_rotary_factor": share})
    source = with_rope_theta(source, _MINIMAX_M2_ROPE_THETA)
    windows = (None,) * reader.layers("num_hidden_layers")
    return MixtralConfig(
        **_fields(source, windows, norm_eps=1e-6, default_head_dim=128, partial_rotary=True),
        **expert_fields(reader, "num_local_experts", "intermediate_size", 8),
        further_layers=further_layers(reader, "num_mtp_modules", 0),
    )


def _fields(
    source: ConfigSource, windows: Windows, *, norm_eps: float, **options: Any
) -> dict[str, Any]:
    """`options`: Of `llama_fields`."""
    source.refuse("mlp_bias")
    return llama_fields(source, windows, norm_eps=norm_eps, needs_kv_heads=True, **options)


def expert_fields(reader: Reader, count_key: str, size_key: str, default_k: int) -> dict[str, Any]:
    """`MixtralConfig`'s own fields."""
    num_experts = reader.integer(count_key)
    k = reader.integer("num_experts_per_tok", default_k)
    if k > num_experts:
        raise reader.bad("num_experts_per_tok", f"there are {num_experts} experts ({count_key})")
    return {
        "num_experts": num_experts,
        "experts_per_token": k,
        "expert_size": reader.integer(size_key),
    }


def _qwen3_count_key(reader: Reader) -> str:
    """The checkpoints say "num_experts", transformers 5 writes "num_local_experts"."""
    keys = ("num_experts", "num_local_experts")
    stated = [key for key in keys if reader.raw.get(key) is not None]
    if len({reader.integer(key) for key in stated}) > 1:
        raise reader.bad("num_local_experts", f"differs from {stated[0]}")
    return stated[0] if stated else "num_experts"


def _sparse_layers(reader: Reader, num_layers: int) -> tuple[bool, ...]:
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense):
        raise reader.bad("mlp_only_layers", "a list of layers is needed")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _windows(reader: Reader, num_layers: int) -> Windows:
    """As transformers 5 has it: sliding where `layer_types` says, by default in every other one of
    the first `max_window_layers`, and nowhere without `use_sliding_window`."""
    window = None
    if reader.flag("use_sliding_window", False):
        window = reader.integer("sliding_window", 4096)
    if reader.raw.get("layer_types") is not None:
        return windows_of_layer_types(reader, num_layers, window, needs="use_sliding_window")
    sliding = max_window_layers(reader)
    return tuple(window if i < sliding and i % 2 == 0 else None for i in range(num_layers))
