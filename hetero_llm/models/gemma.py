"""Gemma: Llama with scaled embeddings and norms whose weight is stored less one."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, GemmaRMSNorm
from hetero_llm.models.llama import LlamaForCausalLM, LlamaLayer
from hetero_llm.models.rotary import RotaryRows


class GemmaLayer(LlamaLayer):
    """See `LlamaLayer`."""

    norm_class = GemmaRMSNorm


class GemmaForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return GemmaLayer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # Rounded to the parameters' type before it multiplies, as in transformers.
        scale = torch.tensor(config.hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu")
        self.embedding_scale = scale.item()

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids).mul_(self.embedding_scale)
        residual: Tensor | None = None
        rotary = RotaryRows(self.rotary, positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attend)
        return self.norm(x, residual)[0]
