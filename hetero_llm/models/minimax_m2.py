"""MiniMax-M2 (MiniMax 2025, and transformers' class): a mixture with sigmoid routing; queries and
keys are normed over all heads, and a part of each head is rotated."""

from __future__ import annotations

from hetero_llm.models.blocks import MLP, Attention
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import MiniMaxM2Config
from hetero_llm.models.experts import SigmoidRouter
from hetero_llm.models.layers import ProjectionNorm
from hetero_llm.models.mixtral import MixtralBlock, MixtralForCausalLM


class MiniMaxM2Attention(Attention):
    """With a `ProjectionNorm`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, head_norm=ProjectionNorm(config))


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def attention_class(cls, config: ModelConfig) -> type[Attention]:
        return MiniMaxM2Attention

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, MiniMaxM2Config)
        router = SigmoidRouter(config.hidden_size, config.num_experts, config.experts_per_token)
        return MixtralBlock(config, router)

    def checkpoint_name(self, name: str) -> str | None:
        assert isinstance(self.config, MiniMaxM2Config)
        skipped = self.in_further_layer(name, self.config.further_layers)
        return None if skipped else super().checkpoint_name(name)
