"""StableLM (Bellagente et al. 2024): gated MLP, partial rotary embedding, sequential layers or
parallel ones with one norm."""

from __future__ import annotations

from hetero_llm.models.blocks import (
    MLP,
    DecoderLayer,
    GatedMLP,
    HeadLayerNorm,
    LayerNormLM,
    Tensors,
)
from hetero_llm.models.config import ModelConfig


class StableLmForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        return GatedMLP(config)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        tensors = super().layer_tensors(layer, prefix)
        norm = layer.attention.head_norm
        if isinstance(norm, HeadLayerNorm):
            for name, heads in zip("qk", norm.split(norm.weight), strict=True):
                for i, view in enumerate(heads):
                    tensors[f"{prefix}.self_attn.{name}_layernorm.norms.{i}.weight"] = view
        return tensors
