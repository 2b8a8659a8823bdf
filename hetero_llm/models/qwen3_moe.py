"""Qwen3-MoE ("Qwen3 Technical Report", Qwen team 2025): Qwen3's attention, and experts without a
shared one."""

from __future__ import annotations

from hetero_llm.models.blocks import MLP, GatedMLP
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import Qwen3MoeConfig
from hetero_llm.models.experts import TopKRouter
from hetero_llm.models.mixtral import NAMED_AS_MLPS, MixtralBlock, MixtralForCausalLM


class Qwen3MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    layer_names = NAMED_AS_MLPS

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, Qwen3MoeConfig)
        if not config.sparse_layers[index]:
            return GatedMLP(config)
        router = TopKRouter(*config.router_sizes, renormalize=config.renormalize, rounded=True)
        return MixtralBlock(config, router)
