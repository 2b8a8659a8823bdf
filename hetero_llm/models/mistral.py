"""Mistral: Llama with a sliding window, which `ModelConfig.sliding_windows` carries."""

from __future__ import annotations

from hetero_llm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""
