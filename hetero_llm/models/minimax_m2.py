"""MiniMax-M2 (MiniMax 2025, and transformers' class): a mixture with sigmoid routing; queries and
keys are normed over all heads, and a part of each head is rotated."""

from __future__ import annotations

from hetero_llm.models.blocks import MLP, Attention
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import MixtralConfig
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
        assert isinstance(config, MixtralConfig)
        return MixtralBlock(config, SigmoidRouter(*config.router_sizes))
