"""Mixtral ("Mixtral of Experts", Jiang et al. 2024): Llama's attention, and experts instead of the
MLP. Other mixtures override `make_mlp` and name their tensors in `layer_names`."""

from __future__ import annotations

import math

from torch import Tensor, nn

from hetero_llm.models.blocks import MLP, DecoderLM, LayerNames
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import MixtralConfig
from hetero_llm.models.experts import Experts, Router, SigmoidRouter, TopKRouter
from hetero_llm.models.layers import checkpoint_views


class MixtralBlock(nn.Module):
    """A router and its experts."""

    def __init__(self, config: MixtralConfig, router: Router) -> None:
        super().__init__()
        self.router = router
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.expert_size, config.hidden_act
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.experts(x, *self.router(x))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> dict[str, Tensor]:
        """See `MLP`."""
        block = f"{prefix}.{names.mixture}"
        corrections = {}
        if isinstance(self.router, SigmoidRouter):
            corrections[f"{block}.{names.correction}"] = self.router.correction
        return {
            **checkpoint_views(f"{block}.gate", self.router.gate),
            **corrections,
            **self.experts.checkpoint_tensors(f"{block}.experts", names.expert),
        }


class MixtralForCausalLM(DecoderLM):
    """See `CausalLM`."""

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, MixtralConfig)
        router = TopKRouter(
            config.hidden_size,
            config.num_experts,
            config.experts_per_token,
            renormalize=True,
            rounded=False,
        )
        return MixtralBlock(config, router)

    def parameters_per_token(self) -> int:
        """A token is multiplied with some of the experts only."""
        assert isinstance(self.config, MixtralConfig)
        idle = 1 - self.config.experts_per_token / self.config.num_experts
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        held = sum(math.prod(w.shape) for m in experts for w in (m.gate_up, m.down))
        return super().parameters_per_token() - int(idle * held)
