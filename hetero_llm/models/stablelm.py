"""StableLM: layer norms, gated MLP, partial rotary embedding, sequential layers or parallel ones
with one norm."""

from __future__ import annotations

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    GatedMLP,
    HeadLayerNorm,
    LayerNormLM,
    OuterNames,
    Tensors,
)
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.layers import checkpoint_views


class StableLmForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("model", "embed_tokens", "layers", "norm")

    def __init__(self, config: LayerNormConfig) -> None:
        layers = (
            DecoderLayer(
                config,
                FusedAttention(
                    config,
                    i,
                    head_norm=HeadLayerNorm(config, bias=False) if config.qk_layer_norm else None,
                ),
                GatedMLP(config),
                parallel=config.parallel,
                shared_norm=config.shared_norm,
            )
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, GatedMLP)
        attention = f"{prefix}.self_attn"
        tensors: Tensors = {
            **layer.norm_tensors(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"),
            **layer.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.o_proj", layer.attention.out_proj),
            **layer.mlp.tensors(f"{prefix}.mlp"),
        }
        norm = layer.attention.head_norm
        if norm is not None:
            for name, heads in zip("qk", norm.split(norm.weight), strict=True):
                for i, view in enumerate(heads):
                    tensors[f"{attention}.{name}_layernorm.norms.{i}.weight"] = view
        return tensors
