"""Qwen2-MoE ("Qwen2 Technical Report", Yang et al. 2024): Qwen2's attention; experts, and one more
that serves every token, behind a gate."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from hetero_llm.models.blocks import MLP, GatedMLP, LayerNames
from hetero_llm.models.collectives import same
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import Qwen2MoeConfig
from hetero_llm.models.experts import Experts, TopKRouter
from hetero_llm.models.layers import Activation, Linear, Reduce, checkpoint_views
from hetero_llm.models.mixtral import MixtralForCausalLM


class Qwen2MoeBlock(nn.Module):
    """A router, its experts and the shared one. `reduce`: see `Experts`."""

    def __init__(self, config: Qwen2MoeConfig) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self.router = TopKRouter(
            hidden, count, config.experts_per_token, renormalize=config.renormalize, rounded=True
        )
        self.experts = Experts(count, hidden, config.expert_size, config.hidden_act)
        self.shared = GatedMLP(config, config.shared_expert_size)
        self.shared_gate = Linear(hidden, 1, bias=False)
        self.sigmoid = Activation("sigmoid")
        self.reduce: Reduce = same

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.reduce(self.experts(x, *self.router(x), self._gated_shared))

    def _gated_shared(self, x: Tensor) -> Tensor:
        shared: Tensor = self.shared(x)
        return shared.mul_(self.sigmoid(self.shared_gate(x)))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> dict[str, Tensor]:
        """See `MLP`."""
        block, shared = f"{prefix}.mlp", "mlp.shared_expert"
        of_shared = replace(
            names,
            mlp_in=(f"{shared}.gate_proj", f"{shared}.up_proj"),
            mlp_out=f"{shared}.down_proj",
        )
        return {
            **checkpoint_views(f"{block}.gate", self.router.gate),
            **self.experts.checkpoint_tensors(
                f"{block}.experts", ("gate_proj", "up_proj", "down_proj")
            ),
            **self.shared.checkpoint_tensors(prefix, of_shared),
            **checkpoint_views(f"{block}.shared_expert_gate", self.shared_gate),
        }


class Qwen2MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, Qwen2MoeConfig)
        return Qwen2MoeBlock(config) if config.sparse_layers[index] else GatedMLP(config)
