"""GLM-4.5 and 4.6 ("GLM-4.5", GLM team 2025): a mixture with sigmoid routing and an expert that
serves every token; the first layers are dense, and a part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.blocks import MLP, GatedMLP
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.glm import Glm4MoeConfig
from hetero_llm.models.experts import SigmoidRouter
from hetero_llm.models.mixtral import NAMED_AS_MLPS, MixtralForCausalLM, SharedExpertBlock


class Glm4MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    layer_names = replace(NAMED_AS_MLPS, correction="gate.e_score_correction_bias")

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, Glm4MoeConfig)
        if not config.sparse_layers[index]:
            return GatedMLP(config)
        router = SigmoidRouter(
            *config.router_sizes,
            groups=config.router_groups,
            kept_groups=config.router_kept_groups,
            renormalize=config.renormalize,
            scale=config.router_scale,
        )
        return SharedExpertBlock(config, router)
