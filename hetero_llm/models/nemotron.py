"""Nemotron (Nemotron-3, Nemotron-4, Minitron): sequential layers, partial rotary embedding,
squared ReLU, norm weights stored less one."""

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
from hetero_llm.models.layers import Place, checkpoint_views


class NemotronForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("model", "embed_tokens", "layers", "norm")

    def __init__(self, config: ModelConfig) -> None:
        layers = (
            DecoderLayer(config, FusedAttention(config, i), PlainMLP(config))
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)

    def checkpoint_tensors(self) -> Tensors:
        tensors = super().checkpoint_tensors()
        for name, view in tensors.items():
            if name.endswith("norm.weight"):
                assert isinstance(view, Tensor)
                tensors[name] = Place(view, tuple(view.shape), _plus_one)
        return tensors

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            **layer.norm_tensors(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"),
            **layer.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.o_proj", layer.attention.out_proj),
            **layer.mlp.tensors(f"{mlp}.up_proj", f"{mlp}.down_proj"),
        }


def _plus_one(stored: Tensor) -> Tensor:
    # In the served dtype, as transformers adds it.
    return stored + 1.0
