"""StarCoder2 (Lozhkov et al. 2024): sequential layers, rotary embedding, sliding window, biases
everywhere."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames, LayerNormLM


class Starcoder2ForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    layer_names = LayerNames(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj")
