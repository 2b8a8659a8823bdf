"""GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019): learned
positions, weights stored transposed."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import DecoderLayer, LayerNames, LayerNormLM, ModelNames, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Embedding, checkpoint_views


class GPT2LMHeadModel(LayerNormLM):
    """See `CausalLM`."""

    names = ModelNames("transformer", "wte", "h", "ln_f")
    layer_names = LayerNames(
        norms=("ln_1", "ln_2"),
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
    )

    first_parts = ("embed_tokens", "embed_positions")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) + self.embed_positions(positions)

    def checkpoint_tensors(self) -> Tensors:
        positions = checkpoint_views("transformer.wpe", self.embed_positions)
        return {**super().checkpoint_tensors(), **positions}

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        """transformers' Conv1D stores [in, out]."""
        tensors = super().layer_tensors(layer, prefix)
        return {
            name: view.t() if isinstance(view, Tensor) and view.dim() == 2 else view
            for name, view in tensors.items()
        }
