"""config.json of InternLM, the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource
from hetero_llm.models.configs.llama_like import read_like, with_defaults


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("attention_bias", "mlp_bias")
    bias = source.config.flag("bias", True)
    config = read_like(_with_rotary(source), "LlamaForCausalLM")
    return dataclasses.replace(config, qkv_bias=bias, out_bias=bias)


def _with_rotary(source: ConfigSource) -> ConfigSource:
    """Later releases have `rotary` instead of rope_theta and rope_scaling."""
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
