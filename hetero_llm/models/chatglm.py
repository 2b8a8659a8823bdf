"""ChatGLM2, ChatGLM3 and GLM-4 ("ChatGLM", GLM team 2024, and their remote code): Llama by other
names, with fused projections and half of each head rotated, neighbour with neighbour."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames, ModelNames
from hetero_llm.models.llama import LlamaForCausalLM


class ChatGLMForConditionalGeneration(LlamaForCausalLM):
    """See `CausalLM`."""

    names = ModelNames(
        model="transformer",
        embed="embedding.word_embeddings",
        layers="encoder.layers",
        norm="encoder.final_layernorm",
        head="transformer.output_layer",
    )
    layer_names = LayerNames(
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        rotates_neighbours=True,
    )
