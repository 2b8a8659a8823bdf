"""Baichuan and Baichuan2 (Yang et al. 2023, and their remote code): Llama with a fused projection.

The models of 13B have ALiBi in place of a rotary embedding; Baichuan2 normalizes the rows of its
head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hetero_llm.models.blocks import LayerNames, Tensors
from hetero_llm.models.layers import RearrangedView
from hetero_llm.models.llama import LlamaForCausalLM

_BAICHUAN2_VOCAB_SIZE = 125696


class BaichuanForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(qkv=("self_attn.W_pack",))

    def checkpoint_tensors(self) -> Tensors:
        tensors = super().checkpoint_tensors()
        # As in vLLM, the size of the vocabulary distinguishes Baichuan2 from Baichuan.
        if self.config.vocab_size == _BAICHUAN2_VOCAB_SIZE and "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = RearrangedView.of(
                self.lm_head.weight, _unit_rows, by_row=True
            )
        return tensors


def _unit_rows(stored: Tensor) -> Tensor:
    return F.normalize(stored.float()).to(stored.dtype)
