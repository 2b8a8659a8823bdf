"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections in its checkpoints; a part of
each head may be rotated."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames
from hetero_llm.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
