"""GPT-J: parallel layers with one norm, rotary embedding of neighbours, a head with a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_llm.models.blocks import (
    DecoderLayer,
    FusedAttention,
    LayerNormLM,
    OuterNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.layers import Place, checkpoint_views


class GPTJForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = OuterNames("transformer", "wte", "h", "ln_f")

    def __init__(self, config: LayerNormConfig) -> None:
        layers = (
            DecoderLayer(
                config, FusedAttention(config, i), PlainMLP(config), parallel=True, shared_norm=True
            )
            for i in range(config.num_layers)
        )
        super().__init__(config, layers, head_bias=True)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        attention = f"{prefix}.attn"
        tensors: Tensors = {
            **layer.norm_tensors(f"{prefix}.ln_1", ""),
            **layer.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.out_proj", layer.attention.out_proj),
            **layer.mlp.tensors(f"{prefix}.mlp.fc_in", f"{prefix}.mlp.fc_out"),
        }
        for name in (f"{attention}.q_proj.weight", f"{attention}.k_proj.weight"):
            view = tensors[name]
            assert isinstance(view, Tensor)
            tensors[name] = Place(view, tuple(view.shape), self._halves)
        return tensors

    def _halves(self, stored: Tensor) -> Tensor:
        """Rows [heads * head_dim, hidden] in the order of `RotaryHeads`: entry 2i is rotated with
        entry 2i + 1, and becomes entry i."""
        rope, head_dim = self.config.rope, self.config.head_dim
        assert rope is not None
        rotated, rest = torch.arange(head_dim, device=stored.device).split(
            (rope.rotary_dim, head_dim - rope.rotary_dim)
        )
        order = torch.cat((rotated[::2], rotated[1::2], rest))
        return stored.view(-1, head_dim, stored.shape[-1])[:, order].reshape(stored.shape)
