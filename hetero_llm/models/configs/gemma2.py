"""config.json of Gemma2."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.gemma import DEFAULTS
from hetero_llm.models.configs.llama_like import (
    read_like,
    windows_of_layer_types,
    with_defaults,
    without,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """Attributes:
    final_softcap: The logits become cap * tanh(logit / cap); None: they stay.
    """

    final_softcap: float | None


def read(source: ConfigSource) -> Gemma2Config:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    source.refuse("use_bidirectional_attention", "mlp_bias")
    reader = source.config
    reader.integer("num_key_value_heads")  # the class' default is one model's size
    others = without(
        with_defaults(source, DEFAULTS),
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
    )
    config = read_like(others, "LlamaForCausalLM")
    windows, max_model_len = source.served_windows(
        _windows(reader, config.num_layers), config.max_model_len
    )
    config = dataclasses.replace(
        config,
        hidden_act=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        sliding_windows=windows,
        max_model_len=max_model_len,
        attn_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=_cap(reader, "attn_logit_softcapping", 50.0),
    )
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Gemma2Config(**fields, final_softcap=_cap(reader, "final_logit_softcapping", 30.0))


def _cap(reader: Reader, key: str, default: float) -> float | None:
    null = key in reader.raw and reader.raw[key] is None
    return None if null else reader.number(key, default)


def _windows(reader: Reader, num_layers: int) -> tuple[int | None, ...]:
    """Every other layer from the first on has the window, unless `layer_types` says otherwise."""
    null = "sliding_window" in reader.raw and reader.raw["sliding_window"] is None
    window = None if null else reader.integer("sliding_window", 4096)
    if reader.raw.get("layer_types") is not None:
        return windows_of_layer_types(reader, num_layers, window)
    return tuple(None if layer % 2 else window for layer in range(num_layers))
