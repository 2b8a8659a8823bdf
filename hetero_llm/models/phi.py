"""Phi 1, 1.5 and 2 ("Textbooks Are All You Need", Gunasekar et al. 2023): parallel layers with one
norm, partial rotary embedding, biases everywhere, the head included."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import (
    DecoderLayer,
    HeadLayerNorm,
    LayerNames,
    LayerNormLM,
    ModelNames,
    Tensors,
)
from hetero_llm.models.layers import RearrangedView


class PhiForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = ModelNames(norm="final_layernorm")
    layer_names = LayerNames(out="self_attn.dense", mlp_in=("mlp.fc1",), mlp_out="mlp.fc2")
    head_norm_bias = True

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        tensors = super().layer_tensors(layer, prefix)
        norm = layer.attention.head_norm
        if isinstance(norm, HeadLayerNorm):
            for key, parameter in norm.named_parameters():
                for name, heads in zip("qk", norm.split(parameter), strict=True):
                    tensors[f"{prefix}.self_attn.{name}_layernorm.{key}"] = _for_all(heads)
        return tensors


def _for_all(heads: Tensor) -> RearrangedView:
    """[heads, head_dim], stored once for all heads."""
    return RearrangedView(heads, tuple(heads.shape[1:]), lambda stored: stored.expand_as(heads))
