"""Phi3: Llama with fused projections in its checkpoints; maybe a part of each head is rotated."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Place, checkpoint_views
from hetero_llm.models.llama import LlamaForCausalLM, LlamaLayer


class Phi3Layer(LlamaLayer):
    """See `LlamaLayer`."""

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        return {
            **checkpoint_views(f"{prefix}.input_layernorm", self.input_norm),
            **checkpoint_views(f"{prefix}.self_attn.qkv_proj", self.qkv_proj),
            **checkpoint_views(f"{prefix}.self_attn.o_proj", self.o_proj),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **checkpoint_views(f"{prefix}.mlp.gate_up_proj", self.gate_up_proj),
            **checkpoint_views(f"{prefix}.mlp.down_proj", self.down_proj),
        }


class Phi3ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return Phi3Layer
