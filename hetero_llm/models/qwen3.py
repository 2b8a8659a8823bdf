"""Qwen3: Llama with a norm on every query and key head (`ModelConfig.qk_norm`)."""

from __future__ import annotations

from hetero_llm.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""
