"""Baichuan: Llama with a fused projection in its checkpoints; the models of 13B have ALiBi in
place of rotary embeddings, and Baichuan2 a head whose rows have length 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, Place, checkpoint_views, split_views
from hetero_llm.models.llama import LlamaForCausalLM, LlamaLayer
from hetero_llm.models.rotary import RotaryRows

_BAICHUAN2_VOCAB_SIZE = 125696


class BaichuanLayer(LlamaLayer):
    """See `LlamaLayer`."""

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        mlp = f"{prefix}.mlp"
        inner = self.down_proj.weight.shape[1]
        return {
            **checkpoint_views(f"{prefix}.input_layernorm", self.input_norm),
            **checkpoint_views(f"{prefix}.self_attn.W_pack", self.qkv_proj),
            **checkpoint_views(f"{prefix}.self_attn.o_proj", self.o_proj),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **split_views(
                self.gate_up_proj, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner]
            ),
            **checkpoint_views(f"{mlp}.down_proj", self.down_proj),
        }


class AlibiLayer(BaichuanLayer):
    """Nothing is rotated: `Attend` adds the bias of `ModelConfig.alibi_slopes`."""

    def attention(self, x: Tensor, rotary: RotaryRows, attend: Attend) -> Tensor:
        queries, keys = self.num_heads, self.num_kv_heads
        heads = self.qkv_proj(x).view(-1, queries + 2 * keys, self.head_dim)
        return attend(self.layer, *heads.split((queries, keys, keys), dim=1))


class BaichuanForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return BaichuanLayer if config.alibi_slopes is None else AlibiLayer

    def checkpoint_tensors(self) -> dict[str, Tensor | Place]:
        tensors = super().checkpoint_tensors()
        # As in vLLM, the size of the vocabulary tells Baichuan2 from Baichuan.
        if self.config.vocab_size == _BAICHUAN2_VOCAB_SIZE:
            weight = self.lm_head.weight
            tensors["lm_head.weight"] = Place(weight, tuple(weight.shape), _unit_rows)
        return tensors


def _unit_rows(stored: Tensor) -> Tensor:
    return F.normalize(stored.float()).to(stored.dtype)
