"""StarCoder2: sequential layers, rotary embedding, sliding window, biases everywhere."""

from __future__ import annotations

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    LayerNormLM,
    OuterNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import checkpoint_views


class Starcoder2ForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("model", "embed_tokens", "layers", "norm")

    def __init__(self, config: ModelConfig) -> None:
        layers = (
            DecoderLayer(config, FusedAttention(config, i), PlainMLP(config))
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            **layer.norm_tensors(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"),
            **layer.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.o_proj", layer.attention.out_proj),
            **layer.mlp.tensors(f"{mlp}.c_fc", f"{mlp}.c_proj"),
        }
