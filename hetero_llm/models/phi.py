"""Phi (1, 1.5 and 2): parallel layers with one norm, partial rotary embedding, biases everywhere,
the head included."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    HeadLayerNorm,
    LayerNormLM,
    OuterNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.layers import Place, checkpoint_views


class PhiForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("model", "embed_tokens", "layers", "final_layernorm")

    def __init__(self, config: LayerNormConfig) -> None:
        layers = (
            DecoderLayer(
                config,
                FusedAttention(
                    config,
                    i,
                    head_norm=HeadLayerNorm(config, bias=True) if config.qk_layer_norm else None,
                ),
                PlainMLP(config),
                parallel=True,
                shared_norm=True,
            )
            for i in range(config.num_layers)
        )
        super().__init__(config, layers, head_bias=True)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention = f"{prefix}.self_attn"
        tensors: Tensors = {
            **layer.norm_tensors(f"{prefix}.input_layernorm", ""),
            **layer.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.dense", layer.attention.out_proj),
            **layer.mlp.tensors(f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"),
        }
        norm = layer.attention.head_norm
        if norm is not None:
            for key, parameter in norm.named_parameters():
                for name, heads in zip("qk", norm.split(parameter), strict=True):
                    tensors[f"{attention}.{name}_layernorm.{key}"] = _for_all(heads)
        return tensors


def _for_all(heads: Tensor) -> Place:
    """[heads, head_dim], stored once for all heads."""
    return Place(heads, tuple(heads.shape[1:]), lambda stored: stored.expand_as(heads))
