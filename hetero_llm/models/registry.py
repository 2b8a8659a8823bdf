"""Architecture name of config.json -> our class and its config reader, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hetero_llm.core.errors import ModelLoadError, shown

if TYPE_CHECKING:
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.config_reader import ConfigSource
    from hetero_llm.models.layers import CausalLM


@dataclass(frozen=True, slots=True)
class Family:
    """Where an architecture is implemented.

    Attributes:
        module: In `hetero_llm.models`.
        reader: Module and function in `hetero_llm.models.configs`: `ConfigSource` ->
            `ModelConfig`.
        name: Of the class in the module; "": that of the architecture.
    """

    module: str
    reader: str
    name: str = ""

    def read(self, source: ConfigSource) -> ModelConfig:
        """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
        module, function = self.reader.split(".")
        return getattr(_module(f"configs.{module}"), function)(source)


_IMAGES = Family("transformers_vision", "transformers_vision.read", "TransformersForImages")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", "llama_like.read"),
        "MistralForCausalLM": Family("llama", "llama_like.read", "LlamaForCausalLM"),
        "Qwen2ForCausalLM": Family("llama", "llama_like.read", "LlamaForCausalLM"),
        "Qwen3ForCausalLM": Family("llama", "llama_like.read", "LlamaForCausalLM"),
        "OPTForCausalLM": Family("opt", "layer_norm.read_opt"),
        "GPT2LMHeadModel": Family("gpt2", "layer_norm.read_gpt2"),
        "GPTNeoXForCausalLM": Family("gpt_neox", "layer_norm.read_gpt_neox"),
        "GPTJForCausalLM": Family("gptj", "layer_norm.read_gptj"),
        "GptOssForCausalLM": Family("gpt_oss", "gpt_oss.read"),
        "FalconForCausalLM": Family("falcon", "falcon.read"),
        "RWForCausalLM": Family("falcon", "falcon.read", "FalconForCausalLM"),
        "BloomForCausalLM": Family("bloom", "layer_norm.read_bloom"),
        "GPTBigCodeForCausalLM": Family("gpt_bigcode", "layer_norm.read_gpt_bigcode"),
        "PhiForCausalLM": Family("phi", "layer_norm.read_phi"),
        "StableLmForCausalLM": Family("stablelm", "layer_norm.read_stablelm"),
        "StableLMEpochForCausalLM": Family(
            "stablelm", "layer_norm.read_stablelm", "StableLmForCausalLM"
        ),
        "NemotronForCausalLM": Family("nemotron", "layer_norm.read_nemotron"),
        "Starcoder2ForCausalLM": Family("starcoder2", "layer_norm.read_starcoder2"),
        "GemmaForCausalLM": Family("gemma", "gemma.read"),
        "Gemma2ForCausalLM": Family("gemma2", "gemma.read_gemma2"),
        "Phi3ForCausalLM": Family("phi3", "llama_like.read_phi3"),
        "InternLMForCausalLM": Family("llama", "llama_like.read_internlm", "LlamaForCausalLM"),
        "InternLM2ForCausalLM": Family("internlm2", "llama_like.read_internlm"),
        "BaiChuanForCausalLM": Family(
            "baichuan", "llama_like.read_baichuan", "BaichuanForCausalLM"
        ),
        "BaichuanForCausalLM": Family("baichuan", "llama_like.read_baichuan"),
        "XverseForCausalLM": Family("llama", "llama_like.read_xverse", "LlamaForCausalLM"),
        "ChatGLMModel": Family("chatglm", "chatglm.read", "ChatGLMForConditionalGeneration"),
        "ChatGLMForConditionalGeneration": Family("chatglm", "chatglm.read"),
        "GlmForCausalLM": Family("glm", "glm.read"),
        "Glm4ForCausalLM": Family("glm4", "glm.read"),
        "QWenLMHeadModel": Family("qwen", "qwen.read"),
        "MixtralForCausalLM": Family("mixtral", "mixture.read"),
        "Qwen2MoeForCausalLM": Family("qwen2_moe", "mixture.read_qwen2_moe"),
        "Qwen3MoeForCausalLM": Family("qwen3_moe", "mixture.read_qwen3_moe"),
        "Glm4MoeForCausalLM": Family("glm4_moe", "glm.read_glm4_moe"),
        "MiniMaxM2ForCausalLM": Family("minimax_m2", "mixture.read_minimax_m2"),
        "PhimoeForCausalLM": Family("phimoe", "mixture.read_phimoe", "PhiMoEForCausalLM"),
        "PhiMoEForCausalLM": Family("phimoe", "mixture.read_phimoe"),
        "LlavaForConditionalGeneration": _IMAGES,
        "LlavaNextForConditionalGeneration": _IMAGES,
        "Qwen2VLForConditionalGeneration": _IMAGES,
    }
)
"""By the name in `architectures` of config.json."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {"Phi3SmallForCausalLM": "its block-sparse attention and muP scaling are not computed"}
)
"""Names in `architectures` that cannot be run, and why."""

_USUAL_END = "ForCausalLM"

TRANSFORMERS = "TransformersForCausalLM"
"""The name under which any class of transformers runs, see `models.transformers_backend`."""


def shown_architectures() -> str:
    """The supported names for a message; what most of them end with is said once."""
    short = [name.removesuffix(_USUAL_END) for name in FAMILIES if name.endswith(_USUAL_END)]
    whole = [name for name in FAMILIES if not name.endswith(_USUAL_END)]
    return f"{', '.join(whole)}, and with {_USUAL_END} at the end: {', '.join(short)}"


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`."""
    if architecture == TRANSFORMERS:
        return _module("transformers_backend").TransformersForCausalLM
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"architecture {shown(architecture)} is not supported; supported are "
            + shown_architectures()
        )
    family = FAMILIES[architecture]
    return getattr(_module(family.module), family.name or architecture)


def _module(name: str) -> Any:
    return importlib.import_module(f"hetero_llm.models.{name}")
