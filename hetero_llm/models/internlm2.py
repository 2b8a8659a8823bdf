"""InternLM2: Llama by other names, with queries, keys and values stored group by group."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Place, checkpoint_views, split_views
from hetero_llm.models.llama import CheckpointNames, LlamaForCausalLM, LlamaLayer


class InternLM2Layer(LlamaLayer):
    """See `LlamaLayer`."""

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        attention, mlp = f"{prefix}.attention", f"{prefix}.feed_forward"
        inner = self.down_proj.weight.shape[1]
        qkv = checkpoint_views(f"{attention}.wqkv", self.qkv_proj)
        return {
            **checkpoint_views(f"{prefix}.attention_norm", self.input_norm),
            **{name: Place(view, tuple(view.shape), self._by_kind) for name, view in qkv.items()},
            **checkpoint_views(f"{attention}.wo", self.o_proj),
            **checkpoint_views(f"{prefix}.ffn_norm", self.post_attention_norm),
            **split_views(self.gate_up_proj, [f"{mlp}.w1", f"{mlp}.w3"], [inner, inner]),
            **checkpoint_views(f"{mlp}.w2", self.down_proj),
        }

    def _by_kind(self, stored: Tensor) -> Tensor:
        """Rows (or biases) of each KV head are stored as its queries, its key and its value."""
        group = self.num_heads // self.num_kv_heads
        heads = stored.view(self.num_kv_heads, group + 2, self.head_dim, *stored.shape[1:])
        kinds = heads[:, :group], heads[:, group], heads[:, group + 1]
        return torch.cat([kind.reshape(-1, *stored.shape[1:]) for kind in kinds])


class InternLM2ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    names = CheckpointNames(embedding="model.tok_embeddings", head="output")

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return InternLM2Layer
