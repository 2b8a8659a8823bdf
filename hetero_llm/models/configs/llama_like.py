"""config.json of Llama and of the families whose keys are Llama's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.common import (
    Windows,
    alibi_slopes,
    llama_fields,
    max_window_layers,
    windows_of_layer_types,
    with_defaults,
)

_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BAICHUAN_7B_HIDDEN_SIZE = 4096
_PHI3_DEFAULTS = {
    "num_key_value_heads": None,  # as many as heads
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}


def read(source: ConfigSource) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3."""
    return read_like(source, source.architecture)


def read_like(source: ConfigSource, like: str, *, partial_rotary: bool = False) -> ModelConfig:
    """For the reader of any family whose keys are Llama's.

    Args:
        source: Both files; where the family's defaults differ, through `with_defaults`.
        like: The architecture of the four above whose defaults and sliding windows it has.
        partial_rotary: The family may rotate a part of each head.
    """
    source.refuse("num_local_experts")
    reader = source.config
    attention_bias = reader.flag("attention_bias", False)
    # The default of transformers' Qwen3 class for every hidden size.
    fixed_head_dim = like == "Qwen3ForCausalLM" and "head_dim" not in reader.raw
    return ModelConfig(
        **llama_fields(
            source,
            _sliding_windows(source, like, reader.layers("num_hidden_layers")),
            norm_eps=1e-6,
            needs_kv_heads=like != "LlamaForCausalLM",
            default_head_dim=128 if fixed_head_dim else None,
            partial_rotary=partial_rotary,
        ),
        qkv_bias=attention_bias or like == "Qwen2ForCausalLM",
        out_bias=attention_bias and like != "Qwen2ForCausalLM",
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=like == "Qwen3ForCausalLM",
    )


def _sliding_windows(source: ConfigSource, like: str, num_layers: int) -> Windows:
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
        first_sliding = max_window_layers(reader)
    windows = tuple(window if layer >= first_sliding else None for layer in range(num_layers))
    if raw.get("layer_types") is None:
        return windows
    stated = windows_of_layer_types(reader, num_layers, window)
    if stated != windows and like not in _QWEN:
        # transformers' Llama and Mistral have one kind of layer and never look at this key.
        raise reader.bad("layer_types", f"mixed layers are not supported with {architecture}")
    return stated


def read_baichuan(source: ConfigSource) -> ModelConfig:
    """Nothing in the file says whether positions are rotary or ALiBi. As in vLLM: the models of 7B
    rotate (Baichuan 1's architecture has a capital C, Baichuan2's 7B is recognized by its hidden
    size), those of 13B do not."""
    source.refuse("attention_bias", "mlp_bias", "num_key_value_heads")
    reader = source.config
    if reader.raw.get("model_max_length") is not None:
        length = reader.integer("model_max_length")
        source = with_defaults(source, {"max_position_embeddings": length})
    rotary = (
        source.architecture == "BaiChuanForCausalLM"
        or reader.integer("hidden_size") == _BAICHUAN_7B_HIDDEN_SIZE
    )
    if not rotary:
        source.refuse("rope_theta", "rope_scaling", "rope_parameters")
    config = read_like(source, "LlamaForCausalLM")
    if rotary:
        return config
    return dataclasses.replace(config, rope=None, alibi_slopes=alibi_slopes(config.num_heads))


def read_internlm(source: ConfigSource) -> ModelConfig:
    """InternLM and InternLM2."""
    source.refuse("attention_bias", "mlp_bias")
    bias = source.config.flag("bias", True)
    if source.architecture == "InternLMForCausalLM":
        source = _with_rotary(source)
    config = read_like(source, "LlamaForCausalLM")
    return dataclasses.replace(config, qkv_bias=bias, out_bias=bias)


def _with_rotary(source: ConfigSource) -> ConfigSource:
    """Later releases of InternLM have `rotary` instead of rope_theta and rope_scaling."""
    reader = source.config
    rotary = reader.raw.get("rotary")
    if rotary is None:
        return source
    known = {"base", "type", "scaling_factor"}
    if not isinstance(rotary, Mapping) or not set(rotary) <= known:
        raise reader.bad("rotary", "an object with the keys base, type and scaling_factor")
    defaults = {"rope_theta": rotary.get("base", 10000)}
    if rotary.get("type") == "dynamic":
        factor = rotary.get("scaling_factor", 1.0)
        defaults["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
    elif rotary.get("type") != "origin":
        raise reader.bad("rotary", 'the type is "origin" or "dynamic"')
    for key in defaults:
        if reader.raw.get(key) is not None:
            raise reader.bad(key, "not together with rotary")
    return with_defaults(source, defaults)


def read_phi3(source: ConfigSource) -> ModelConfig:
    """Phi-3 and Phi-4, which have one class."""
    source.refuse("attention_bias", "mlp_bias")
    raw = dict(source.config.raw)
    for key in ("rope_scaling", "rope_parameters"):
        raw[key] = _renamed_scaling(raw.get(key))
    source = dataclasses.replace(
        source,
        config=Reader(raw, source.config.where),
        rope_scaling=_renamed_scaling(source.rope_scaling),
    )
    source = with_defaults(source, _PHI3_DEFAULTS)
    return read_like(source, "MistralForCausalLM", partial_rotary=True)


def _renamed_scaling(scaling: Any) -> Any:
    """The first releases call "longrope" "su" or "yarn", and transformers reads them so."""
    if not isinstance(scaling, Mapping):
        return scaling
    changed = {k: "longrope" for k in ("type", "rope_type") if scaling.get(k) in ("su", "yarn")}
    return {**scaling, **changed}


def read_xverse(source: ConfigSource) -> ModelConfig:
    source.refuse("bias", "num_experts")
    return read_like(source, "LlamaForCausalLM")
