"""Llama ("LLaMA", Touvron et al. 2023), the family that the native CPU executor computes; Mixtral
and Qwen2-MoE are two more.

Mistral, Qwen2, Qwen3, InternLM and XVERSE are this class with other flags in `ModelConfig`.
"""

from __future__ import annotations

from hetero_llm.models.blocks import DecoderLM


class LlamaForCausalLM(DecoderLM):
    """A subclass may store the same weights under other names. What it computes differently it
    overrides, which tells the executor that it cannot run the model."""
