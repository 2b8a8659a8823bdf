"""PhiMoE (Phi-3.5-MoE): Mixtral with layer norms, biases and a router by sparse mixer."""

from __future__ import annotations

from torch import Tensor, nn

from hetero_llm.models.configs.mixtral import MixtralConfig
from hetero_llm.models.configs.phimoe import PhiMoEConfig
from hetero_llm.models.experts import Experts, SparseMixerRouter
from hetero_llm.models.layers import AddLayerNorm, RMSNorm, checkpoint_views
from hetero_llm.models.mixtral import MixtralForCausalLM, MixtralLayer


class PhiMoEBlock(nn.Module):
    """A router and its experts."""

    def __init__(self, config: PhiMoEConfig) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self.router = SparseMixerRouter(hidden, count, config.router_jitter)
        self.experts = Experts(count, hidden, config.expert_size, config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.experts(x, *self.router(x))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `MLP`."""
        block = f"{prefix}.block_sparse_moe"
        return {
            **checkpoint_views(f"{block}.gate", self.router.gate),
            **self.experts.checkpoint_tensors(f"{block}.experts", ("w1", "w3", "w2")),
        }


class PhiMoEForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    def make_layer(self, config: MixtralConfig, layer: int) -> MixtralLayer:
        assert isinstance(config, PhiMoEConfig)
        return MixtralLayer(config, layer, PhiMoEBlock(config), norm=AddLayerNorm)

    def make_norm(self, size: int, eps: float) -> RMSNorm | AddLayerNorm:
        return AddLayerNorm(size, eps)

    def head_bias(self, config: MixtralConfig) -> bool:
        assert isinstance(config, PhiMoEConfig)
        return config.head_bias
