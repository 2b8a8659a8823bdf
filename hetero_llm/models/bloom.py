"""BLOOM: ALiBi, a norm of the embedding, sequential layers, biases everywhere."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    LayerNormLM,
    OuterNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import AddLayerNorm, checkpoint_views


class BloomForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("transformer", "word_embeddings", "h", "ln_f")

    def __init__(self, config: ModelConfig) -> None:
        layers = (
            DecoderLayer(config, FusedAttention(config, i), PlainMLP(config))
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)
        self.embed_norm = AddLayerNorm(config.hidden_size, config.norm_eps)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed_tokens(input_ids))[0]

    def checkpoint_tensors(self) -> Tensors:
        norm = checkpoint_views("transformer.word_embeddings_layernorm", self.embed_norm)
        return {**super().checkpoint_tensors(), **norm}

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
        return {
            **layer.norm_tensors(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"),
            **layer.attention.grouped_tensors(f"{attention}.query_key_value"),
            **checkpoint_views(f"{attention}.dense", layer.attention.out_proj),
            **layer.mlp.tensors(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"),
        }
