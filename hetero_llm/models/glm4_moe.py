"""GLM-4.5 and 4.6 ("GLM-4.5", GLM team 2025): a mixture with sigmoid routing and an expert that
serves every token; the first layers are dense, and a part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hetero_llm.models.blocks import MLP, GatedMLP, LayerNames
from hetero_llm.models.collectives import same
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.glm import Glm4MoeConfig
from hetero_llm.models.experts import SigmoidRouter
from hetero_llm.models.layers import Reduce
from hetero_llm.models.mixtral import MixtralBlock, MixtralForCausalLM


class Glm4MoeBlock(MixtralBlock):
    """A router, its experts and the shared ones, which are one MLP. `reduce`: see `Experts`."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        router = SigmoidRouter(
            config.hidden_size,
            config.num_experts,
            config.experts_per_token,
            groups=config.router_groups,
            kept_groups=config.router_kept_groups,
            renormalize=config.renormalize,
            scale=config.router_scale,
        )
        super().__init__(config, router)
        self.shared = GatedMLP(config, config.shared_expert_size)
        self.reduce: Reduce = same

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.experts(x, *self.router(x), self.shared))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> dict[str, Tensor]:
        shared = f"{names.mixture}.shared_experts"
        of_shared = replace(
            names,
            mlp_in=(f"{shared}.gate_proj", f"{shared}.up_proj"),
            mlp_out=f"{shared}.down_proj",
        )
        return {
            **super().checkpoint_tensors(prefix, names),
            **self.shared.checkpoint_tensors(prefix, of_shared),
        }


class Glm4MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(
        mixture="mlp",
        expert=("gate_proj", "up_proj", "down_proj"),
        correction="gate.e_score_correction_bias",
    )

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, Glm4MoeConfig)
        return Glm4MoeBlock(config) if config.sparse_layers[index] else GatedMLP(config)

    def checkpoint_name(self, name: str) -> str | None:
        assert isinstance(self.config, Glm4MoeConfig)
        skipped = self.in_further_layer(name, self.config.further_layers)
        return None if skipped else super().checkpoint_name(name)
