"""PhiMoE (Phi-3.5-MoE; "GRIN", Liu et al. 2024): Mixtral with layer norms, biases and a router by
sparse mixer."""

from __future__ import annotations

from hetero_llm.models.blocks import MLP
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import PhiMoEConfig
from hetero_llm.models.experts import SparseMixerRouter
from hetero_llm.models.layers import AddLayerNorm
from hetero_llm.models.mixtral import MixtralBlock, MixtralForCausalLM


class PhiMoEForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    norm_class = AddLayerNorm

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, PhiMoEConfig)
        router = SparseMixerRouter(config.hidden_size, config.num_experts, config.router_jitter)
        return MixtralBlock(config, router)
