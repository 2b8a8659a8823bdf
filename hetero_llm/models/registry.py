"""Architecture name of config.json -> our class and its config reader, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from hetero_llm.core.errors import ModelLoadError, shown

if TYPE_CHECKING:
    from hetero_llm.models.layers import CausalLM


@dataclass(frozen=True, slots=True)
class Family:
    """Where an architecture is implemented.

    Attributes:
        module: In `hetero_llm.models`.
        name: Of the class there.
        reader: In `hetero_llm.models.configs`; its `read(ConfigSource)` gives a `ModelConfig`.
    """

    module: str
    name: str
    reader: str


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like"),
        "MistralForCausalLM": Family("mistral", "MistralForCausalLM", "llama_like"),
        "Qwen2ForCausalLM": Family("qwen2", "Qwen2ForCausalLM", "llama_like"),
        "Qwen3ForCausalLM": Family("qwen3", "Qwen3ForCausalLM", "llama_like"),
        "OPTForCausalLM": Family("opt", "OPTForCausalLM", "opt"),
        "GPT2LMHeadModel": Family("gpt2", "GPT2LMHeadModel", "gpt2"),
    }
)
"""By the name in `architectures` of config.json."""


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in `architectures` of config.json."""
    return tuple(FAMILIES)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`."""
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"architecture {shown(architecture)} is not supported; supported are "
            + ", ".join(FAMILIES)
        )
    family = FAMILIES[architecture]
    return getattr(importlib.import_module(f"hetero_llm.models.{family.module}"), family.name)
