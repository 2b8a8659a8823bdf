"""GPT-NeoX (Pythia, Dolly, OpenAssistant): parallel layers with a norm each for attention and MLP,
or sequential ones; partial rotary embedding, biases everywhere."""

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


class GPTNeoXForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("gpt_neox", "embed_in", "layers", "final_layer_norm", "embed_out")

    def __init__(self, config: LayerNormConfig) -> None:
        layers = (
            DecoderLayer(
                config, FusedAttention(config, i), PlainMLP(config), parallel=config.parallel
            )
            for i in range(config.num_layers)
        )
        super().__init__(config, layers)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention, mlp = f"{prefix}.attention", f"{prefix}.mlp"
        return {
            **layer.norm_tensors(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"),
            **layer.attention.grouped_tensors(f"{attention}.query_key_value"),
            **checkpoint_views(f"{attention}.dense", layer.attention.out_proj),
            **layer.mlp.tensors(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"),
        }

    def checkpoint_name(self, name: str) -> str | None:
        """Some releases of transformers call the head lm_head."""
        if name.startswith("lm_head."):
            name = name.replace("lm_head", self.names.head, 1)
        return super().checkpoint_name(name)
