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
        name: Of the class there.
        reader: Module and function in `hetero_llm.models.configs`: `ConfigSource` ->
            `ModelConfig`.
    """

    module: str
    name: str
    reader: str

    def read(self, source: ConfigSource) -> ModelConfig:
        """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
        module, function = self.reader.split(".")
        return getattr(_module(f"configs.{module}"), function)(source)


_IMAGES = Family("transformers_vision", "TransformersForImages", "transformers_vision.read")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read"),
        "MistralForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read"),
        "Qwen2ForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read"),
        "Qwen3ForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read"),
        "OPTForCausalLM": Family("opt", "OPTForCausalLM", "layer_norm.read_opt"),
        "GPT2LMHeadModel": Family("gpt2", "GPT2LMHeadModel", "layer_norm.read_gpt2"),
        "GPTNeoXForCausalLM": Family("gpt_neox", "GPTNeoXForCausalLM", "layer_norm.read_gpt_neox"),
        "GPTJForCausalLM": Family("gptj", "GPTJForCausalLM", "layer_norm.read_gptj"),
        "GptOssForCausalLM": Family("gpt_oss", "GptOssForCausalLM", "gpt_oss.read"),
        "FalconForCausalLM": Family("falcon", "FalconForCausalLM", "falcon.read"),
        "RWForCausalLM": Family("falcon", "FalconForCausalLM", "falcon.read"),
        "BloomForCausalLM": Family("bloom", "BloomForCausalLM", "layer_norm.read_bloom"),
        "GPTBigCodeForCausalLM": Family(
            "gpt_bigcode", "GPTBigCodeForCausalLM", "layer_norm.read_gpt_bigcode"
        ),
        "PhiForCausalLM": Family("phi", "PhiForCausalLM", "layer_norm.read_phi"),
        "StableLmForCausalLM": Family(
            "stablelm", "StableLmForCausalLM", "layer_norm.read_stablelm"
        ),
        "StableLMEpochForCausalLM": Family(
            "stablelm", "StableLmForCausalLM", "layer_norm.read_stablelm"
        ),
        "NemotronForCausalLM": Family(
            "nemotron", "NemotronForCausalLM", "layer_norm.read_nemotron"
        ),
        "Starcoder2ForCausalLM": Family(
            "starcoder2", "Starcoder2ForCausalLM", "layer_norm.read_starcoder2"
        ),
        "GemmaForCausalLM": Family("gemma", "GemmaForCausalLM", "gemma.read"),
        "Gemma2ForCausalLM": Family("gemma2", "Gemma2ForCausalLM", "gemma.read_gemma2"),
        "Phi3ForCausalLM": Family("phi3", "Phi3ForCausalLM", "llama_like.read_phi3"),
        "InternLMForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read_internlm"),
        "InternLM2ForCausalLM": Family(
            "internlm2", "InternLM2ForCausalLM", "llama_like.read_internlm"
        ),
        "BaiChuanForCausalLM": Family(
            "baichuan", "BaichuanForCausalLM", "llama_like.read_baichuan"
        ),
        "BaichuanForCausalLM": Family(
            "baichuan", "BaichuanForCausalLM", "llama_like.read_baichuan"
        ),
        "XverseForCausalLM": Family("llama", "LlamaForCausalLM", "llama_like.read_xverse"),
        "ChatGLMModel": Family("chatglm", "ChatGLMForConditionalGeneration", "chatglm.read"),
        "ChatGLMForConditionalGeneration": Family(
            "chatglm", "ChatGLMForConditionalGeneration", "chatglm.read"
        ),
        "GlmForCausalLM": Family("glm", "GlmForCausalLM", "glm.read"),
        "Glm4ForCausalLM": Family("glm4", "Glm4ForCausalLM", "glm.read"),
        "QWenLMHeadModel": Family("qwen", "QWenLMHeadModel", "qwen.read"),
        "MixtralForCausalLM": Family("mixtral", "MixtralForCausalLM", "mixture.read"),
        "Qwen2MoeForCausalLM": Family("qwen2_moe", "Qwen2MoeForCausalLM", "mixture.read_qwen2_moe"),
        "Qwen3MoeForCausalLM": Family("qwen3_moe", "Qwen3MoeForCausalLM", "mixture.read_qwen3_moe"),
        "Glm4MoeForCausalLM": Family("glm4_moe", "Glm4MoeForCausalLM", "glm.read_glm4_moe"),
        "MiniMaxM2ForCausalLM": Family(
            "minimax_m2", "MiniMaxM2ForCausalLM", "mixture.read_minimax_m2"
        ),
        "PhimoeForCausalLM": Family("phimoe", "PhiMoEForCausalLM", "mixture.read_phimoe"),
        "PhiMoEForCausalLM": Family("phimoe", "PhiMoEForCausalLM", "mixture.read_phimoe"),
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


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in `architectures` of config.json."""
    return tuple(FAMILIES)


def shown_architectures() -> str:
    """The same for a message; what most of them end with is said once."""
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
    return getattr(_module(family.module), family.name)


def _module(name: str) -> Any:
    return importlib.import_module(f"hetero_llm.models.{name}")
