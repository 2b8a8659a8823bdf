"""config.json of Llama, Mistral, Qwen2 and Qwen3, and what other families' have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import (
    ConfigSource,
    Reader,
    eos_and_bos,
    heads_of,
    torch_dtype,
)
from hetero_llm.models.rope_config import scaled_max_position

_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Read by other architectures; a checkpoint that sets one computes something that we do not.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_local_experts",
    "no_rope_layers",
)


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    return read_like(source, source.architecture)


def with_defaults(source: ConfigSource, defaults: Mapping[str, Any]) -> ConfigSource:
    """The same with values for keys that config.json lacks."""
    reader = Reader({**defaults, **source.config.raw}, source.config.where)
    return dataclasses.replace(source, config=reader)


def without(source: ConfigSource, *keys: str) -> ConfigSource:
    """The same without keys of config.json, which the caller reads."""
    raw = {key: value for key, value in source.config.raw.items() if key not in keys}
    return dataclasses.replace(source, config=Reader(raw, source.config.where))


def read_like(source: ConfigSource, like: str, *, partial_rotary: bool = False) -> ModelConfig:
    """For the reader of any family whose keys are Llama's.

    Args:
        source: Both files; where the family's defaults differ, through `with_defaults`.
        like: The architecture of the four above whose defaults and sliding windows it has.
        partial_rotary: The family may rotate a part of each head.
    """
    source.refuse(*_REFUSED)
    reader = source.config
    raw = reader.raw
    hidden, heads, quotient = heads_of(reader, "num_attention_heads", "hidden_size")
    if like == "Qwen3ForCausalLM" and "head_dim" not in raw:
        quotient = 128  # the default of transformers' class, whatever the hidden size
    if raw.get("head_dim") is None and not quotient:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    head_dim = reader.integer("head_dim", quotient)
    # Only Llama's class defaults to as many KV heads as heads; the others' defaults are sizes of
    # one particular model, so an absent key there is taken for a damaged file.
    if like != "LlamaForCausalLM" and "num_key_value_heads" not in raw:
        raise ModelLoadError(f"{reader.where}: the key 'num_key_value_heads' is missing")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(head_dim, max_position)
    if rope.rotary_dim != head_dim and not partial_rotary:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    max_model_len = scaled_max_position(rope, max_position)
    windows = _sliding_windows(source, like, num_layers)
    windows, max_model_len = source.served_windows(windows, max_model_len)
    qkv_bias = like == "Qwen2ForCausalLM" or reader.flag("attention_bias", False)
    eos, bos = eos_and_bos(reader, source.generation)
    return ModelConfig(
        architecture=source.architecture,
        model_type=str(raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=max_model_len,
        max_position_embeddings=max_position,
        torch_dtype=torch_dtype(reader),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=qkv_bias,
        out_bias=reader.flag("attention_bias", False) and like != "Qwen2ForCausalLM",
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=like == "Qwen3ForCausalLM",
        hidden_act=reader.activation("hidden_act", "silu"),
        sliding_windows=windows,
        attn_scale=head_dim**-0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
    )


def _sliding_windows(source: ConfigSource, like: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from the several ways the families state it."""
    reader, architecture = source.config, source.architecture
    raw = reader.raw
    null = "sliding_window" in raw and raw["sliding_window"] is None
    first_sliding = 0
    if like == "LlamaForCausalLM":
        if raw.get("sliding_window") is not None:
            raise reader.bad("sliding_window", f"not supported with {architecture}")
        window = None
    elif like == "MistralForCausalLM":
        window = None if null else reader.integer("sliding_window", 4096)
    else:
        off = null or not reader.flag("use_sliding_window", False)
        window = None if off else reader.integer("sliding_window", 4096)
        first_sliding = raw.get("max_window_layers", 28)
        if not isinstance(first_sliding, int) or first_sliding < 0:
            raise reader.bad("max_window_layers", "a number of layers is needed")
    windows = tuple(window if layer >= first_sliding else None for layer in range(num_layers))
    if raw.get("layer_types") is None:
        return windows
    stated = windows_of_layer_types(reader, num_layers, window)
    if stated != windows and like not in _QWEN:
        # transformers' Llama and Mistral have one kind of layer and never look at this key.
        raise reader.bad("layer_types", f"mixed layers are not supported with {architecture}")
    return stated


def windows_of_layer_types(
    reader: Reader, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """The windows that `layer_types` states."""
    types = reader.raw["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.bad("layer_types", f"a list of {num_layers} entries is needed")
    for entry in types:
        if entry not in ("full_attention", "sliding_attention"):
            raise reader.bad("layer_types", f"{shown(entry)} is not supported")
        if entry == "sliding_attention" and window is None:
            raise reader.bad("layer_types", "sliding_attention needs a sliding_window")
    return tuple(window if entry == "sliding_attention" else None for entry in types)
