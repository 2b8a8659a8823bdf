"""config.json of Mixtral, and what all mixtures of experts here have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import (
    ConfigSource,
    Reader,
    eos_and_bos,
    heads_of,
    torch_dtype,
)
from hetero_llm.models.rope_config import scaled_max_position

# Read by other architectures; a checkpoint that sets one computes something that we do not.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "no_rope_layers",
    "mlp_bias",
)
_DEFAULT_THETA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    """Of a mixture of experts.

    Attributes:
        num_experts: In each layer that has experts.
        experts_per_token: That each row visits.
        expert_size: Inner size of one expert.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int


def read(source: ConfigSource) -> MixtralConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("attention_bias")
    source = with_default_theta(source, _DEFAULT_THETA)
    reader = source.config
    num_layers = reader.integer("num_hidden_layers")
    window = None
    if reader.raw.get("sliding_window") is not None:
        window = reader.integer("sliding_window")
    return MixtralConfig(
        **common_fields(source, (window,) * num_layers, norm_eps=1e-5),
        **expert_fields(reader, "num_local_experts", "intermediate_size", 2),
        qkv_bias=False,
        out_bias=False,
    )


def with_default_theta(source: ConfigSource, theta: float) -> ConfigSource:
    """For families whose classes have another base than rope_config's default."""
    reader = source.config
    if reader.raw.get("rope_theta") is not None:
        return source
    raw = {**reader.raw, "rope_theta": theta}  # one that stands in rope_parameters goes before it
    return dataclasses.replace(source, config=Reader(raw, reader.where))


def common_fields(
    source: ConfigSource, windows: tuple[int | None, ...], *, norm_eps: float
) -> dict[str, Any]:
    """Fields of `ModelConfig` that all these families read alike; biases are theirs to add.

    Args:
        windows: Of each layer, as the file says.
        norm_eps: Where the file does not say.
    """
    source.refuse(*_REFUSED)
    reader = source.config
    hidden, heads, quotient = heads_of(reader, "num_attention_heads", "hidden_size")
    if reader.raw.get("head_dim") is None and not quotient:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    head_dim = reader.integer("head_dim", quotient)
    if "num_key_value_heads" not in reader.raw:
        # The classes' defaults are those of one particular model.
        raise ModelLoadError(f"{reader.where}: the key 'num_key_value_heads' is missing")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(head_dim, max_position)
    if rope.rotary_dim != head_dim:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    max_model_len = scaled_max_position(rope, max_position)
    windows, max_model_len = source.served_windows(windows, max_model_len)
    eos, bos = eos_and_bos(reader, source.generation)
    return {
        "architecture": source.architecture,
        "model_type": str(reader.raw.get("model_type", "")),
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": reader.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.integer("intermediate_size"),
        "max_model_len": max_model_len,
        "max_position_embeddings": max_position,
        "torch_dtype": torch_dtype(reader),
        "norm_eps": reader.number("rms_norm_eps", norm_eps),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "rope": rope,
        "mlp_bias": False,
        "qk_norm": False,
        "hidden_act": reader.activation("hidden_act", "silu"),
        "sliding_windows": windows,
        "attn_scale": head_dim**-0.5,
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "word_embed_size": hidden,
    }


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
