"""ChatGLM2, ChatGLM3 and GLM-4 as their authors store them: Llama by other names, with fused
projections and half of each head rotated, neighbour with neighbour."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Place, checkpoint_views
from hetero_llm.models.llama import CheckpointNames, LlamaForCausalLM, LlamaLayer
from hetero_llm.models.rotary import half_split_order


class ChatGLMLayer(LlamaLayer):
    """See `LlamaLayer`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.rope is not None
        self.rotary_dim = config.rope.rotary_dim

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        attention = f"{prefix}.self_attention"
        qkv = checkpoint_views(f"{attention}.query_key_value", self.qkv_proj)
        return {
            **checkpoint_views(f"{prefix}.input_layernorm", self.input_norm),
            **{n: Place(view, tuple(view.shape), self._half_split) for n, view in qkv.items()},
            **checkpoint_views(f"{attention}.dense", self.o_proj),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **checkpoint_views(f"{prefix}.mlp.dense_h_to_4h", self.gate_up_proj),
            **checkpoint_views(f"{prefix}.mlp.dense_4h_to_h", self.down_proj),
        }

    def _half_split(self, stored: Tensor) -> Tensor:
        """Rows (or biases) of queries and keys in the order that `RotaryHeads` wants."""
        rotated = self.num_heads + self.num_kv_heads
        heads = stored.view(-1, self.head_dim, *stored.shape[1:])
        order = half_split_order(self.head_dim, self.rotary_dim)
        return torch.cat((heads[:rotated, order], heads[rotated:])).view(stored.shape)


class ChatGLMForConditionalGeneration(LlamaForCausalLM):
    """See `CausalLM`."""

    names = CheckpointNames(
        embedding="transformer.embedding.word_embeddings",
        layers="transformer.encoder.layers",
        norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
    )

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return ChatGLMLayer
