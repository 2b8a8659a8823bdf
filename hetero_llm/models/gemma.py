"""Gemma (Gemma team 2024): Llama with scaled embeddings and norms whose weight is stored less
one."""

from __future__ import annotations

import torch

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import GemmaRMSNorm
from hetero_llm.models.llama import LlamaForCausalLM


class GemmaForCausalLM(LlamaForCausalLM):
    """See `CausalLM`."""

    norm_class = GemmaRMSNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # Rounded to the parameters' type before it multiplies, as in transformers.
        scale = torch.tensor(config.hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu")
        self.embed_tokens.scale = scale.item()
