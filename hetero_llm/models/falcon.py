"""Falcon: 7B (parallel, one norm, one KV head), 40B and 180B (a norm each for attention and MLP,
grouped KV heads), 11B (grouped, one norm), RW (sequential, ALiBi)."""

from __future__ import annotations

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    LayerNormLM,
    OuterNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.layers import checkpoint_views


class FalconForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("transformer", "word_embeddings", "h", "ln_f")

    def __init__(self, config: LayerNormConfig) -> None:
        layers = (
            DecoderLayer(
                config,
                FusedAttention(config, i),
                PlainMLP(config),
                parallel=config.parallel,
                shared_norm=config.shared_norm,
            )
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
        norms = ("input_layernorm", "post_attention_layernorm")
        if layer.parallel and layer.mlp_norm is not None:
            norms = ("ln_attn", "ln_mlp")
        return {
            **layer.norm_tensors(*(f"{prefix}.{norm}" for norm in norms)),
            **layer.attention.grouped_tensors(f"{attention}.query_key_value"),
            **checkpoint_views(f"{attention}.dense", layer.attention.out_proj),
            **layer.mlp.tensors(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"),
        }
