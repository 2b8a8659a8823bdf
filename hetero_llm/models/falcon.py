"""Falcon (Almazrouei et al. 2023): 7B (parallel, one norm, one KV head), 40B and 180B (a norm each
for attention and MLP, grouped KV heads), 11B (grouped, one norm), RW (sequential, ALiBi)."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.blocks import DecoderLayer, LayerNormLM, Tensors
from hetero_llm.models.bloom import BloomForCausalLM


class FalconForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = BloomForCausalLM.names
    layer_names = BloomForCausalLM.layer_names

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        names = self.layer_names
        if layer.parallel and layer.mlp_norm is not None:
            names = replace(names, norms=("ln_attn", "ln_mlp"))
        return layer.checkpoint_tensors(prefix, names)
