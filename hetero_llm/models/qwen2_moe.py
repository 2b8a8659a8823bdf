"""Qwen2-MoE ("Qwen2 Technical Report", Yang et al. 2024): Qwen2's attention; experts, and one more
that serves every token, behind a gate."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import MLP, GatedMLP, LayerNames, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import Qwen2MoeConfig
from hetero_llm.models.experts import TopKRouter
from hetero_llm.models.layers import Activation, Linear, checkpoint_views
from hetero_llm.models.mixtral import NAMED_AS_MLPS, MixtralForCausalLM, SharedExpertBlock


class Qwen2MoeBlock(SharedExpertBlock):
    """A router, its experts, and the shared one behind a gate."""

    shared_name = "shared_expert"

    def __init__(self, config: Qwen2MoeConfig) -> None:
        sizes = config.router_sizes
        super().__init__(config, TopKRouter(*sizes, renormalize=config.renormalize, rounded=True))
        self.shared_gate = Linear(config.hidden_size, 1, bias=False)
        self.sigmoid = Activation("sigmoid")

    def shared_output(self, x: Tensor) -> Tensor:
        return super().shared_output(x).mul_(self.sigmoid(self.shared_gate(x)))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        gate = checkpoint_views(f"{prefix}.{names.mixture}.shared_expert_gate", self.shared_gate)
        return {**super().checkpoint_tensors(prefix, names), **gate}


class Qwen2MoeForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    layer_names = NAMED_AS_MLPS

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, Qwen2MoeConfig)
        return Qwen2MoeBlock(config) if config.sparse_layers[index] else GatedMLP(config)
