"""Architecture name of config.json -> our class, imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from hetero_llm.core.errors import ModelLoadError, shown

if TYPE_CHECKING:
    from hetero_llm.models.layers import CausalLM

_CLASSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("hetero_llm.models.llama", "LlamaForCausalLM"),
        "MistralForCausalLM": ("hetero_llm.models.mistral", "MistralForCausalLM"),
        "Qwen2ForCausalLM": ("hetero_llm.models.qwen2", "Qwen2ForCausalLM"),
        "Qwen3ForCausalLM": ("hetero_llm.models.qwen3", "Qwen3ForCausalLM"),
        "OPTForCausalLM": ("hetero_llm.models.opt", "OPTForCausalLM"),
        "GPT2LMHeadModel": ("hetero_llm.models.gpt2", "GPT2LMHeadModel"),
    }
)


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in `architectures` of config.json."""
    return tuple(_CLASSES)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`."""
    if architecture not in _CLASSES:
        raise ModelLoadError(
            f"architecture {shown(architecture)} is not supported; supported are "
            + ", ".join(_CLASSES)
        )
    module, name = _CLASSES[architecture]
    return getattr(importlib.import_module(module), name)
