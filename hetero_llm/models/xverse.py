"""XVERSE: Llama by another name."""

from __future__ import annotations

from hetero_llm.models.llama import LlamaForCausalLM


class XverseForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""
