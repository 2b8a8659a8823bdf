"""config.json of Phi3 (and Phi 4, which is the same class)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.llama_like import read_like, with_defaults

_DEFAULTS = {
    "num_key_value_heads": None,  # as many as heads
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("attention_bias", "mlp_bias")
    raw = dict(source.config.raw)
    for key in ("rope_scaling", "rope_parameters"):
        raw[key] = _renamed(raw.get(key))
    source = dataclasses.replace(
        source,
        config=Reader(raw, source.config.where),
        rope_scaling=_renamed(source.rope_scaling),
    )
    source = with_defaults(source, _DEFAULTS)
    return read_like(source, "MistralForCausalLM", partial_rotary=True)


def _renamed(scaling: Any) -> Any:
    """The first releases call "longrope" "su" or "yarn", and transformers reads them so."""
    if not isinstance(scaling, Mapping):
        return scaling
    changed = {k: "longrope" for k in ("type", "rope_type") if scaling.get(k) in ("su", "yarn")}
    return {**scaling, **changed}
