"""GLM-4 9B by transformers' class ("ChatGLM", GLM team 2024): Llama with a fused gate and up
projection; a part of each head is rotated, neighbour with neighbour."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames
from hetero_llm.models.llama import LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(mlp_in=("mlp.gate_up_proj",), rotates_neighbours=True)
