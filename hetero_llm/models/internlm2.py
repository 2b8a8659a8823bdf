"""InternLM2 (Cai et al. 2024): Llama by other names, with queries, keys and values stored KV head
by KV head."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames, ModelNames
from hetero_llm.models.llama import LlamaForCausalLM


class InternLM2ForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    names = ModelNames(embed="tok_embeddings", head="output")
    layer_names = LayerNames(
        norms=("attention_norm", "ffn_norm"),
        qkv=("attention.wqkv",),
        out="attention.wo",
        mlp_in=("feed_forward.w1", "feed_forward.w3"),
        mlp_out="feed_forward.w2",
        qkv_by_kv_head=True,
    )
