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


_IMAGES = Family("transformers_vision", "TransformersForImages", "transformers_vision")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like"),
        "MistralForCausalLM": Family("mistral", "MistralForCausalLM", "llama_like"),
        "Qwen2ForCausalLM": Family("qwen2", "Qwen2ForCausalLM", "llama_like"),
        "Qwen3ForCausalLM": Family("qwen3", "Qwen3ForCausalLM", "llama_like"),
        "OPTForCausalLM": Family("opt", "OPTForCausalLM", "opt"),
        "GPT2LMHeadModel": Family("gpt2", "GPT2LMHeadModel", "gpt2"),
        "GPTNeoXForCausalLM": Family("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox"),
        "GPTJForCausalLM": Family("gptj", "GPTJForCausalLM", "gptj"),
        "FalconForCausalLM": Family("falcon", "FalconForCausalLM", "falcon"),
        "RWForCausalLM": Family("falcon", "FalconForCausalLM", "falcon"),
        "BloomForCausalLM": Family("bloom", "BloomForCausalLM", "bloom"),
        "GPTBigCodeForCausalLM": Family("gpt_bigcode", "GPTBigCodeForCausalLM", "gpt_bigcode"),
        "PhiForCausalLM": Family("phi", "PhiForCausalLM", "phi"),
        "StableLmForCausalLM": Family("stablelm", "StableLmForCausalLM", "stablelm"),
        "StableLMEpochForCausalLM": Family("stablelm", "StableLmForCausalLM", "stablelm"),
        "NemotronForCausalLM": Family("nemotron", "NemotronForCausalLM", "nemotron"),
        "Starcoder2ForCausalLM": Family("starcoder2", "Starcoder2ForCausalLM", "starcoder2"),
        "GemmaForCausalLM": Family("gemma", "GemmaForCausalLM", "gemma"),
        "Gemma2ForCausalLM": Family("gemma2", "Gemma2ForCausalLM", "gemma2"),
        "Phi3ForCausalLM": Family("phi3", "Phi3ForCausalLM", "phi3"),
        "InternLMForCausalLM": Family("internlm", "InternLMForCausalLM", "internlm"),
        "InternLM2ForCausalLM": Family("internlm2", "InternLM2ForCausalLM", "internlm2"),
        "BaiChuanForCausalLM": Family("baichuan", "BaichuanForCausalLM", "baichuan"),
        "BaichuanForCausalLM": Family("baichuan", "BaichuanForCausalLM", "baichuan"),
        "XverseForCausalLM": Family("xverse", "XverseForCausalLM", "xverse"),
        "ChatGLMModel": Family("chatglm", "ChatGLMForConditionalGeneration", "chatglm"),
        "ChatGLMForConditionalGeneration": Family(
            "chatglm", "ChatGLMForConditionalGeneration", "chatglm"
        ),
        "QWenLMHeadModel": Family("qwen", "QWenLMHeadModel", "qwen"),
        "MixtralForCausalLM": Family("mixtral", "MixtralForCausalLM", "mixtral"),
        "Qwen2MoeForCausalLM": Family("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2_moe"),
        "PhimoeForCausalLM": Family("phimoe", "PhiMoEForCausalLM", "phimoe"),
        "PhiMoEForCausalLM": Family("phimoe", "PhiMoEForCausalLM", "phimoe"),
        "LlavaForConditionalGeneration": _IMAGES,
        "LlavaNextForConditionalGeneration": _IMAGES,
        "Qwen2VLForConditionalGeneration": _IMAGES,
    }
)
"""By the name in `architectures` of config.json."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {"Phi3SmallForCausalLM": "its block-sparse attention and muP scaling are not computed"}
)
"""Such names that nothing here can run, and why."""

TRANSFORMERS = "TransformersForCausalLM"
"""In the place of such a name: a class of transformers, see `models.transformers_backend`."""


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in `architectures` of config.json."""
    return tuple(FAMILIES)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`."""
    if architecture == TRANSFORMERS:
        return importlib.import_module(
            "hetero_llm.models.transformers_backend"
        ).TransformersForCausalLM
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"architecture {shown(architecture)} is not supported; supported are "
            + ", ".join(FAMILIES)
        )
    family = FAMILIES[architecture]
    return getattr(importlib.import_module(f"hetero_llm.models.{family.module}"), family.name)
