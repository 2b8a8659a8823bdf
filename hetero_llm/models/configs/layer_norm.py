"""What the configurations of families with layer norms share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader, eos_and_bos, heads_of, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(ModelConfig):
    """Arithmetic that `ModelConfig` does not know.

    Attributes:
        parallel: Attention and MLP both read the layer's input, and their outputs are added to it
            together ("GPT-J-6B", Wang and Komatsuzaki 2021).
        shared_norm: Of parallel layers: one norm serves both.
        qk_layer_norm: Layer norm of every query and key head before the rotary embedding.
    """

    parallel: bool = False
    shared_norm: bool = False
    qk_layer_norm: bool = False


def shape_fields(
    source: ConfigSource,
    *,
    hidden: Iterable[str] = ("hidden_size",),
    heads: Iterable[str] = ("num_attention_heads",),
    layers: Iterable[str] = ("num_hidden_layers",),
    free_head_dim: bool = False,
) -> dict[str, Any]:
    """Fields of `ModelConfig` that every family reads alike, with full attention in all layers.

    Args:
        source: Both files.
        hidden, heads, layers: Keys of the hidden size, the number of heads and of layers, in all
            spellings; the first one present counts.
        free_head_dim: Whether the class reads `head_dim`; else it is the hidden size by the heads.
    """
    reader = source.config
    heads_key = first_key(reader, heads)
    size, count, quotient = heads_of(reader, heads_key, first_key(reader, hidden))
    free = free_head_dim and reader.raw.get("head_dim") is not None
    if not free and not quotient:
        raise reader.bad(heads_key, f"does not divide the hidden size {size}")
    head_dim = reader.integer("head_dim", quotient)
    if not free_head_dim and head_dim != quotient:
        raise reader.bad("head_dim", f"{source.architecture} has heads of {quotient}")
    num_layers = reader.integer(first_key(reader, layers))
    eos, bos = eos_and_bos(reader, source.generation)
    return {
        "architecture": source.architecture,
        "model_type": str(reader.raw.get("model_type", "")),
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": size,
        "num_layers": num_layers,
        "num_heads": count,
        "head_dim": head_dim,
        "torch_dtype": torch_dtype(reader),
        "qk_norm": False,
        "attn_scale": head_dim**-0.5,
        "sliding_windows": (None,) * num_layers,
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "word_embed_size": size,
    }


def first_key(reader: Reader, keys: Iterable[str]) -> str:
    """The first of several spellings that is present, or else the first one."""
    spellings = tuple(keys)
    present = (key for key in spellings if reader.raw.get(key) is not None)
    return next(present, spellings[0])


def kv_heads_of(reader: Reader, heads: int, default: int | None) -> int:
    """`num_key_value_heads`; without a default it must be there."""
    kv_heads = reader.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    return kv_heads


def rotary_share(reader: Reader, *keys: str) -> float | None:
    """The rotated share of a head under an older name, which `partial_rotary_factor` replaced."""
    found = None
    for key in keys:
        if reader.raw.get(key) is None:
            continue
        share = reader.number(key, 1.0)
        if found is None:
            found = share
        stated = reader.raw.get("partial_rotary_factor")
        if share != found or stated not in (None, share):
            raise reader.bad(key, "differs from another key with the same meaning")
    return found


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope per head, as the paper's authors choose them ("Train Short, Test Long", Press et
    al. 2022): a geometric series for the largest power of two, and every other one of the next
    series for the heads beyond."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]
    return tuple(slopes)
