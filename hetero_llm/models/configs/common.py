"""What readers of several families share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.config_reader import (
    LARGEST_SIZE,
    MOST_LAYERS,
    ConfigSource,
    Reader,
    eos_and_bos,
    heads_of,
    torch_dtype,
)
from hetero_llm.models.rope_config import RopeConfig, scaled_max_position

Windows = tuple[int | None, ...]


def base_fields(
    source: ConfigSource,
    *,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    num_layers: int,
    vocab_key: str = "vocab_size",
) -> dict[str, Any]:
    """Fields of `ModelConfig` that every family reads alike, with full attention in all layers."""
    reader = source.config
    vocab_size = reader.integer(vocab_key)
    eos, bos = eos_and_bos(reader, source.generation, vocab_size)
    return {
        "architecture": source.architecture,
        "model_type": str(reader.raw.get("model_type", "")),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "torch_dtype": torch_dtype(reader),
        "sliding_windows": (None,) * num_layers,
        "attn_scale": head_dim**-0.5,
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "word_embed_size": hidden_size,
    }


def position_fields(rope: RopeConfig | None, max_position: int) -> dict[str, Any]:
    """Fields of `ModelConfig` on positions; `max_position`: in tokens, before rope scaling."""
    longest = max_position if rope is None else scaled_max_position(rope, max_position)
    if longest > LARGEST_SIZE:
        raise ValueError(
            f"max_position_embeddings={max_position} with rope scaling: a context of {longest} "
            f"tokens; at most {LARGEST_SIZE} are possible"
        )
    return {
        "rope": rope,
        "max_model_len": longest,
        "max_position_embeddings": max_position,
    }


def llama_fields(
    source: ConfigSource,
    windows: Windows,
    *,
    norm_eps: float,
    needs_kv_heads: bool,
    default_head_dim: int | None = None,
    partial_rotary: bool = False,
) -> dict[str, Any]:
    """Fields of `ModelConfig`, except biases, of families whose keys are Llama's.

    Args:
        windows: Of each layer, as the file states them.
        norm_eps: Where the file does not state it.
        needs_kv_heads: Whether the file must state the number of KV heads: the default of the
            family's class is the number of one particular model. Else it is the number of heads.
        default_head_dim: Where the file does not state it; None: the hidden size by the heads.
        partial_rotary: Whether the family may rotate a part of each head.
    """
    # Other architectures read these; a checkpoint that sets one computes something that we do not.
    source.refuse(
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "no_rope_layers",
    )
    reader = source.config
    hidden, heads, quotient = heads_of(reader, "num_attention_heads", "hidden_size")
    quotient = default_head_dim or quotient
    if reader.raw.get("head_dim") is None and not quotient:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    head_dim = reader.integer("head_dim", quotient)
    if needs_kv_heads and "num_key_value_heads" not in reader.raw:
        raise ModelLoadError(f"{reader.where}: the key 'num_key_value_heads' is missing")
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(head_dim, max_position)
    if rope.rotary_dim != head_dim and not partial_rotary:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    fields = {
        **base_fields(
            source, hidden_size=hidden, num_heads=heads, head_dim=head_dim, num_layers=len(windows)
        ),
        **position_fields(rope, max_position),
        "num_kv_heads": kv_heads_of(reader, heads, heads),
        "intermediate_size": reader.integer("intermediate_size"),
        "norm_eps": reader.number("rms_norm_eps", norm_eps),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "hidden_act": reader.activation("hidden_act", "silu"),
    }
    fields["sliding_windows"], fields["max_model_len"] = source.served_windows(
        windows, fields["max_model_len"]
    )
    return fields


def kv_heads_of(reader: Reader, heads: int, default: int | None) -> int:
    """`num_key_value_heads`; without a default it must be stated."""
    kv_heads = reader.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    return kv_heads


def whole_heads_of(reader: Reader, heads_key: str, hidden_key: str) -> tuple[int, int, int]:
    """hidden_size, number of heads and their quotient, which must be a whole number."""
    hidden, heads, head_dim = heads_of(reader, heads_key, hidden_key)
    if not head_dim:
        raise reader.bad(heads_key, f"does not divide {hidden_key}={hidden}")
    return hidden, heads, head_dim


def with_config(source: ConfigSource, raw: Mapping[str, Any]) -> ConfigSource:
    """The same with another content of config.json."""
    return dataclasses.replace(source, config=Reader(raw, source.config.where))


def with_defaults(source: ConfigSource, defaults: Mapping[str, Any]) -> ConfigSource:
    """The same with values for keys that config.json lacks."""
    return with_config(source, {**defaults, **source.config.raw})


def with_rope_theta(source: ConfigSource, theta: Any) -> ConfigSource:
    """The same with `rope_theta` if config.json lacks it or has null."""
    if source.config.raw.get("rope_theta") is not None:
        return source
    return with_config(source, {**source.config.raw, "rope_theta": theta})


def same_window(reader: Reader, num_layers: int) -> Windows:
    """`sliding_window` in every layer, None without the key."""
    stated = reader.raw.get("sliding_window") is not None
    return (reader.integer("sliding_window") if stated else None,) * num_layers


def alternating_windows(reader: Reader, num_layers: int, default: int) -> Windows:
    """`sliding_window` in every other layer from the first one on, unless `layer_types` says
    otherwise. `default`: Without the key; null stands for none."""
    null = "sliding_window" in reader.raw and reader.raw["sliding_window"] is None
    window = None if null else reader.integer("sliding_window", default)
    if reader.raw.get("layer_types") is not None:
        return windows_of_layer_types(reader, num_layers, window)
    return tuple(None if layer % 2 else window for layer in range(num_layers))


def further_layers(reader: Reader, key: str, default: int) -> int:
    """Layers that predict further tokens, stored behind the others and not served."""
    count = reader.raw.get(key)
    count = default if count is None else count
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise reader.bad(key, "a number of layers is needed")
    return count


def max_window_layers(reader: Reader) -> int:
    """Qwen's `max_window_layers`, which may be 0."""
    layers = reader.raw.get("max_window_layers", 28)
    if not isinstance(layers, int) or layers < 0:
        raise reader.bad("max_window_layers", "a number of layers is needed")
    return layers


def windows_of_layer_types(
    reader: Reader, num_layers: int, window: int | None, *, needs: str = "a sliding_window"
) -> Windows:
    """The windows that `layer_types` states; `needs`: what a sliding layer lacks without one."""
    types = reader.raw["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.bad("layer_types", f"a list of {num_layers} entries is needed")
    for entry in types:
        if entry not in ("full_attention", "sliding_attention"):
            raise reader.bad("layer_types", f"{shown(entry)} is not supported")
        if entry == "sliding_attention" and window is None:
            raise reader.bad("layer_types", f"sliding_attention needs {needs}")
    return tuple(window if entry == "sliding_attention" else None for entry in types)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope per head, as the paper's authors choose them ("Train Short, Test Long", Press et
    al. 2022): a geometric series for the largest power of two, and every other one of the next
    series for the heads beyond."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]
    return tuple(slopes)
