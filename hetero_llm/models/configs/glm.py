"""config.json of GLM-4 and GLM-4.5 in transformers' format; `chatglm.py` reads that of the remote
code."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.common import further_layers, llama_fields, with_defaults
from hetero_llm.models.configs.mixture import Qwen2MoeConfig, expert_fields

_ROTATED = {"partial_rotary_factor": 0.5}
_NORM_EPS = 1.5625e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(Qwen2MoeConfig):
    """`router_groups`, `router_kept_groups`, `router_scale`: See `experts.sigmoid_top_k`."""

    router_groups: int
    router_kept_groups: int
    router_scale: float


def read(source: ConfigSource) -> ModelConfig:
    """GLM-4 and GLM-4-0414."""
    source.refuse("mlp_bias", "sliding_window", "layer_types", "num_local_experts")
    source = with_defaults(source, _ROTATED)
    reader = source.config
    return ModelConfig(
        **llama_fields(
            source,
            (None,) * reader.layers("num_hidden_layers"),
            norm_eps=_NORM_EPS,
            needs_kv_heads=True,
            default_head_dim=128,
            partial_rotary=True,
        ),
        qkv_bias=reader.flag("attention_bias", True),
    )


def read_glm4_moe(source: ConfigSource) -> Glm4MoeConfig:
    """GLM-4.5 and its successors of the same class."""
    source.refuse("mlp_bias", "sliding_window", "layer_types")
    source = with_defaults(source, _ROTATED)
    reader = source.config
    num_layers = reader.layers("num_hidden_layers")
    dense = _dense_layers(reader)
    experts = expert_fields(reader, "n_routed_experts", "moe_intermediate_size", 8)
    groups, kept_groups = _groups(reader, experts["num_experts"], experts["experts_per_token"])
    return Glm4MoeConfig(
        **llama_fields(
            source,
            (None,) * num_layers,
            norm_eps=1e-5,
            needs_kv_heads=True,
            partial_rotary=True,
        ),
        **experts,
        qkv_bias=reader.flag("attention_bias", False),
        qk_norm=reader.flag("use_qk_norm", False),
        sparse_layers=tuple(layer >= dense for layer in range(num_layers)),
        shared_expert_size=experts["expert_size"] * reader.integer("n_shared_experts", 1),
        router_groups=groups,
        router_kept_groups=kept_groups,
        renormalize=reader.flag("norm_topk_prob", True),
        router_scale=reader.number("routed_scaling_factor", 1.0),
        further_layers=further_layers(reader, "num_nextn_predict_layers", 1),
    )


def _dense_layers(reader: Reader) -> int:
    count = reader.raw.get("first_k_dense_replace")
    count = 1 if count is None else count
    if type(count) is not int or count < 0:
        raise reader.bad("first_k_dense_replace", "a number of layers is needed")
    return count


def _groups(reader: Reader, num_experts: int, k: int) -> tuple[int, int]:
    """`n_group` and `topk_group`, of which the router chooses."""
    groups, kept = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    if num_experts % groups or (groups > 1 and num_experts // groups < 2):
        reason = f"groups of as many of the {num_experts} experts are needed, two at least"
        raise reader.bad("n_group", reason)
    if not k <= kept * (num_experts // groups) <= num_experts:
        raise reader.bad("topk_group", f"{k} experts in at most {groups} groups are needed")
    return groups, kept
