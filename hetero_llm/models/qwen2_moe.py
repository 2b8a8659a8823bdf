"""Qwen2-MoE: Qwen2's attention; experts, and one more that every row visits, behind a gate."""

from __future__ import annotations

from torch import Tensor, nn

from hetero_llm.models.configs.mixtral import MixtralConfig
from hetero_llm.models.configs.qwen2_moe import Qwen2MoeConfig
from hetero_llm.models.experts import Experts, TopKRouter
from hetero_llm.models.layers import (
    Activation,
    GatedActivation,
    Linear,
    checkpoint_views,
    split_views,
)
from hetero_llm.models.mixtral import MixtralForCausalLM, MixtralLayer


class GatedMLP(nn.Module):
    """activation(gate) * up, and down."""

    def __init__(self, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=False)
        self.activation = GatedActivation(activation)
        self.down_proj = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def checkpoint_tensors(self, prefix: str, name: str = "mlp") -> dict[str, Tensor]:
        """See `MLP`; `name` follows the prefix."""
        mlp = f"{prefix}.{name}"
        return {
            **split_views(
                self.gate_up_proj,
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                [self.down_proj.weight.shape[1]] * 2,
            ),
            **checkpoint_views(f"{mlp}.down_proj", self.down_proj),
        }


class Qwen2MoeBlock(nn.Module):
    """A router, its experts and the shared one."""

    def __init__(self, config: Qwen2MoeConfig) -> None:
        super().__init__()
        hidden, count, activation = config.hidden_size, config.num_experts, config.hidden_act
        self.router = TopKRouter(
            hidden, count, config.experts_per_token, renormalize=config.renormalize, rounded=True
        )
        self.experts = Experts(count, hidden, config.expert_size, activation)
        self.shared = GatedMLP(hidden, config.shared_expert_size, activation)
        self.shared_gate = Linear(hidden, 1, bias=False)
        self.sigmoid = Activation("sigmoid")

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        shared = self.shared(x).mul_(self.sigmoid(self.shared_gate(x)))
        return self.experts(x, *self.router(x)).add_(shared)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `MLP`."""
        block = f"{prefix}.mlp"
        names = ("gate_proj", "up_proj", "down_proj")
        return {
            **checkpoint_views(f"{block}.gate", self.router.gate),
            **self.experts.checkpoint_tensors(f"{block}.experts", names),
            **self.shared.checkpoint_tensors(block, "shared_expert"),
            **checkpoint_views(f"{block}.shared_expert_gate", self.shared_gate),
        }


class Qwen2MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    def make_layer(self, config: MixtralConfig, layer: int) -> MixtralLayer:
        assert isinstance(config, Qwen2MoeConfig)
        if config.sparse_layers[layer]:
            return MixtralLayer(config, layer, Qwen2MoeBlock(config))
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        return MixtralLayer(config, layer, mlp)
