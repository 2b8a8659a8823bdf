"""BLOOM (Le Scao et al. 2022): ALiBi, a norm of the embedding, biases everywhere."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import LayerNames, LayerNormLM, ModelNames, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import checkpoint_views


class BloomForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = ModelNames("transformer", "word_embeddings", "h", "ln_f")
    layer_names = LayerNames(
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        qkv_by_kv_head=True,
    )

    first_parts = ("embed_tokens", "embed_norm")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_norm = self.make_norm(config)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed_tokens(input_ids))[0]

    def checkpoint_tensors(self) -> Tensors:
        norm = checkpoint_views("transformer.word_embeddings_layernorm", self.embed_norm)
        return {**super().checkpoint_tensors(), **norm}
