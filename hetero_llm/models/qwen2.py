"""Qwen2: Llama with biases on queries, keys and values and windows on the upper layers."""

from __future__ import annotations

from hetero_llm.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""
