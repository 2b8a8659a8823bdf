"""GPTBigCode ("SantaCoder", Ben Allal et al. 2023; "StarCoder", Li et al. 2023): GPT-2 with one KV
head or as many as query heads, weights stored as they are used."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.blocks import DecoderLayer, Tensors
from hetero_llm.models.gpt2 import GPT2LMHeadModel


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """See `CausalLM`."""

    layer_names = replace(GPT2LMHeadModel.layer_names, qkv_by_kv_head=True)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        return layer.checkpoint_tensors(prefix, self.layer_names)
