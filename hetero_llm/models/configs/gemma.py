"""config.json of Gemma and Gemma2."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.common import alternating_windows, with_config
from hetero_llm.models.configs.llama_like import read_like

_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """Attributes:
    final_softcap: The logits become cap * tanh(logit / cap); None: no cap.
    """

    final_softcap: float | None


def read(source: ConfigSource) -> ModelConfig:
    """Gemma."""
    config = _read_like_llama(source)
    return dataclasses.replace(config, hidden_act=_activation(source.config))


def read_gemma2(source: ConfigSource) -> Gemma2Config:
    """Gemma2."""
    reader = source.config
    config = _read_like_llama(
        source, "attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "layer_types"
    )
    windows, max_model_len = source.served_windows(
        alternating_windows(reader, config.num_layers, 4096), config.max_model_len
    )
    config = dataclasses.replace(
        config,
        hidden_act=reader.activation("hidden_activation", _TANH),
        sliding_windows=windows,
        max_model_len=max_model_len,
        attn_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=_cap(reader, "attn_logit_softcapping", 50.0),
    )
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Gemma2Config(**fields, final_softcap=_cap(reader, "final_logit_softcapping", 30.0))


def _read_like_llama(source: ConfigSource, *own_keys: str) -> ModelConfig:
    """What both have in common with Llama; the caller reads `own_keys`."""
    source.refuse("use_bidirectional_attention", "mlp_bias")
    source.config.integer("num_key_value_heads")  # the class' default is one model's size
    raw = {**_DEFAULTS, **source.config.raw}
    kept = {key: value for key, value in raw.items() if key not in own_keys}
    return read_like(with_config(source, kept), "LlamaForCausalLM")


def _activation(reader: Reader) -> str:
    """Gemma's first releases say "gelu" and mean its tanh approximation, as transformers knows;
    some files name it under `hidden_activation` too."""
    keys = [k for k in ("hidden_activation", "hidden_act") if reader.raw.get(k) is not None]
    names = [reader.activation(key, _TANH).replace(_TANH, "gelu") for key in keys]
    if len(set(names)) > 1:
        raise reader.bad("hidden_activation", "differs from hidden_act")
    return _TANH if not names or names[0] == "gelu" else names[0]


def _cap(reader: Reader, key: str, default: float) -> float | None:
    null = key in reader.raw and reader.raw[key] is None
    return None if null else reader.number(key, default)
