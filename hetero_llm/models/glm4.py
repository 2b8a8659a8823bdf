"""GLM-4-0414 and GLM-Z1 (GLM team 2025, and transformers' class): GLM-4 with norms before and after
attention and MLP."""

from __future__ import annotations

from hetero_llm.models.blocks import DecoderLayer
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.glm import GlmForCausalLM


class Glm4ForCausalLM(GlmForCausalLM):
    """See `CausalLM`."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return self.sandwich_layer(config, index)
