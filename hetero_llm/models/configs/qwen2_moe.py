"""config.json of Qwen2-MoE."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_llm.core.errors import shown
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.mixtral import MixtralConfig, common_fields, expert_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(MixtralConfig):
    """`intermediate_size` is that of the layers without experts.

    Attributes:
        sparse_layers: Which layers have experts.
        shared_expert_size: Inner size of the one that every row visits.
        renormalize: The weights of a row's experts add up to one.
    """

    sparse_layers: tuple[bool, ...]
    shared_expert_size: int
    renormalize: bool


def read(source: ConfigSource) -> Qwen2MoeConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("attention_bias")
    reader = source.config
    num_layers = reader.integer("num_hidden_layers")
    return Qwen2MoeConfig(
        **common_fields(source, _windows(reader, num_layers), norm_eps=1e-6),
        **expert_fields(reader, "num_experts", "moe_intermediate_size", 4),
        qkv_bias=reader.flag("qkv_bias", True),
        out_bias=False,
        sparse_layers=_sparse_layers(reader, num_layers),
        shared_expert_size=reader.integer("shared_expert_intermediate_size"),
        renormalize=reader.flag("norm_topk_prob", False),
    )


def _sparse_layers(reader: Reader, num_layers: int) -> tuple[bool, ...]:
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense):
        raise reader.bad("mlp_only_layers", "a list of layers is needed")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _windows(reader: Reader, num_layers: int) -> tuple[int | None, ...]:
    """As transformers 5 has it: sliding where `layer_types` says, by default in every other one of
    the first `max_window_layers`, and nowhere without `use_sliding_window`."""
    raw = reader.raw
    window = None
    if reader.flag("use_sliding_window", False):
        window = reader.integer("sliding_window", 4096)
    types = raw.get("layer_types")
    if types is None:
        sliding = raw.get("max_window_layers", 28)
        if not isinstance(sliding, int) or sliding < 0:
            raise reader.bad("max_window_layers", "a number of layers is needed")
        return tuple(window if i < sliding and i % 2 == 0 else None for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.bad("layer_types", f"a list of {num_layers} entries is needed")
    for entry in types:
        if entry not in ("full_attention", "sliding_attention"):
            raise reader.bad("layer_types", f"{shown(entry)} is not supported")
        if entry == "sliding_attention" and window is None:
            raise reader.bad("layer_types", "sliding_attention needs use_sliding_window")
    return tuple(window if entry == "sliding_attention" else None for entry in types)
