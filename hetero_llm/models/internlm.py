"""InternLM, the first one: Llama with biases in the attention's projections."""

from __future__ import annotations

from hetero_llm.models.llama import LlamaForCausalLM


class InternLMForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""
