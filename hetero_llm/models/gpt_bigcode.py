"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one KV head or as many as heads, weights stored
as they are used."""

from __future__ import annotations

from hetero_llm.models.blocks import DecoderLayer, PlainMLP, Tensors
from hetero_llm.models.gpt2 import GPT2LMHeadModel
from hetero_llm.models.layers import checkpoint_views


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """See `CausalLM`."""

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        assert isinstance(layer.mlp, PlainMLP)
        return {
            **layer.norm_tensors(f"{prefix}.ln_1", f"{prefix}.ln_2"),
            **layer.attention.grouped_tensors(f"{prefix}.attn.c_attn"),
            **checkpoint_views(f"{prefix}.attn.c_proj", layer.attention.out_proj),
            **layer.mlp.tensors(f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj"),
        }
