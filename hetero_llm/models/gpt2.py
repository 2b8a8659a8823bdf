"""GPT-2: learned positions, layer norms before, plain MLP, weights stored transposed."""

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
from hetero_llm.models.layers import Embedding, Linear, checkpoint_views


class GPT2LMHeadModel(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("transformer", "wte", "h", "ln_f")

    def __init__(self, config: ModelConfig) -> None:
        layers = (
            DecoderLayer(config, FusedAttention(config, i), PlainMLP(config))
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) + self.embed_positions(positions)

    def checkpoint_tensors(self) -> Tensors:
        positions = checkpoint_views("transformer.wpe", self.embed_positions)
        return {**super().checkpoint_tensors(), **positions}

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        return {
            **layer.norm_tensors(f"{prefix}.ln_1", f"{prefix}.ln_2"),
            **_transposed_views(f"{prefix}.attn.c_attn", layer.attention.qkv_proj),
            **_transposed_views(f"{prefix}.attn.c_proj", layer.attention.out_proj),
            **_transposed_views(f"{prefix}.mlp.c_fc", layer.mlp.fc1),
            **_transposed_views(f"{prefix}.mlp.c_proj", layer.mlp.fc2),
        }


def _transposed_views(prefix: str, linear: Linear) -> dict[str, Tensor]:
    """GPT-2's Conv1D stores [in, out]."""
    assert linear.bias is not None
    return {f"{prefix}.weight": linear.weight.t(), f"{prefix}.bias": linear.bias}
