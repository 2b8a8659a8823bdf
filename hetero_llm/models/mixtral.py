"""Mixtral ("Mixtral of Experts", Jiang et al. 2024): Llama's attention, and experts instead of the
MLP. Other mixtures override `make_mlp` and name their tensors in `layer_names`."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn

from hetero_llm.models.blocks import MLP, DecoderLM, GatedMLP, LayerNames, Tensors
from hetero_llm.models.collectives import same
from hetero_llm.models.config import Gate, ModelConfig
from hetero_llm.models.configs.mixture import MixtralConfig, Qwen2MoeConfig
from hetero_llm.models.experts import Experts, Router, SigmoidRouter, TopKRouter
from hetero_llm.models.layers import Reduce, checkpoint_views

NAMED_AS_MLPS = LayerNames(mixture="mlp", expert=("gate_proj", "up_proj", "down_proj"))
"""Names of mixtures whose experts are called as Llama's MLP."""


class MixtralBlock(nn.Module):
    """A router and its experts.

    Args:
        gate: Of the experts; None: `hidden_act`.
        bias: Whether the experts' products have biases.
    """

    def __init__(
        self, config: MixtralConfig, router: Router, *, gate: Gate | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.router = router
        sizes = (config.num_experts, config.hidden_size, config.expert_size)
        self.experts = Experts(*sizes, gate or config.hidden_act, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.experts(x, *self.router(x))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
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


class SharedExpertBlock(MixtralBlock):
    """With experts that serve every token, which are one MLP. `reduce`: see `Experts`.

    Attributes:
        shared_name: What checkpoints call that MLP, below the mixture.
    """

    shared_name = "shared_experts"

    def __init__(self, config: Qwen2MoeConfig, router: Router) -> None:
        super().__init__(config, router)
        self.shared = GatedMLP(config, config.shared_expert_size)
        self.reduce: Reduce = same

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.experts(x, *self.router(x), self.shared_output))

    def shared_output(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], what is added to the output of the others."""
        return self.shared(x)

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        gate, up, down = (f"{names.mixture}.{self.shared_name}.{name}" for name in names.expert)
        of_shared = replace(names, mlp_in=(gate, up), mlp_out=down)
        return {
            **super().checkpoint_tensors(prefix, names),
            **self.shared.checkpoint_tensors(prefix, of_shared),
        }


class MixtralForCausalLM(DecoderLM):
    """See `CausalLM`."""

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, MixtralConfig)
        router = TopKRouter(*config.router_sizes, renormalize=True, rounded=False)
        return MixtralBlock(config, router)

    def checkpoint_name(self, name: str) -> str | None:
        """Layers that predict further tokens, behind the model's own, are not served."""
        assert isinstance(self.config, MixtralConfig)
        layer = self.layer_of(name)
        behind = -1 if layer is None else layer - self.config.first_layer - self.config.num_layers
        skipped = 0 <= behind < self.config.further_layers
        return None if skipped else super().checkpoint_name(name)

    def parameters_per_token(self) -> int:
        """A token is multiplied with some of the experts only."""
        assert isinstance(self.config, MixtralConfig)
        idle = 1 - self.config.experts_per_token / self.config.num_experts
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        held = sum(math.prod(w.shape) for m in experts for w in (m.gate_up, m.down))
        return super().parameters_per_token() - int(idle * held)
