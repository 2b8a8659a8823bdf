"""gpt-oss ("gpt-oss-120b & gpt-oss-20b Model Card", OpenAI 2025): sliding windows in every other
layer, attention sinks, and experts with biases and a clamped gate."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from hetero_llm.models.blocks import MLP, Attention, LayerNames, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.gpt_oss import GptOssConfig
from hetero_llm.models.experts import TopKRouter
from hetero_llm.models.layers import Attend, BankView, Linear, RearrangedView, checkpoint_views
from hetero_llm.models.mixtral import MixtralBlock, MixtralForCausalLM
from hetero_llm.models.rotary import StepRotary

_BANK = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


class GptOssAttention(Attention):
    """`sinks` [heads]: see `Attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))

    def forward(self, x: Tensor, rotary: StepRotary, attend: Attend) -> Tensor:
        assert self.heads is not None
        qkv = self.project(x, rotary)
        attended = attend.rotary(self.layer, qkv, self.heads, rotary, sinks=self.sinks)
        return self.out_proj(attended.flatten(1))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        tensors = super().checkpoint_tensors(prefix, names)
        return {**tensors, f"{prefix}.self_attn.sinks": self.sinks}


class GptOssRouter(TopKRouter):
    """A projection with a bias, and a softmax of the chosen logits: that of all logits, divided by
    the sum of the chosen ones' shares."""

    def make_gate(self, hidden: int, num_experts: int) -> Linear:
        return Linear(hidden, num_experts, bias=True)


class GptOssBlock(MixtralBlock):
    """A router and its experts, with biases."""

    def __init__(self, config: GptOssConfig) -> None:
        router = GptOssRouter(*config.router_sizes, renormalize=True, rounded=True)
        super().__init__(config, router, gate=config.gate, bias=True)

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        """See `MLP`. Files have the experts' matrices as one tensor, gates and ups in turn."""
        experts, bank = self.experts, f"{prefix}.mlp.experts"
        assert experts.gate_up_bias is not None and experts.down_bias is not None

        def of_biases(stored: Tensor) -> Tensor:
            return _gates_first(stored.unsqueeze(2)).view(stored.shape)

        return {
            **checkpoint_views(f"{prefix}.mlp.router", self.router.gate),
            f"{bank}.gate_up_proj.weight": BankView.of_experts(experts.gate_up, _gates_first),
            f"{bank}.gate_up_proj_bias": RearrangedView.of(experts.gate_up_bias, of_biases),
            f"{bank}.down_proj.weight": BankView.of_experts(experts.down),
            f"{bank}.down_proj_bias": experts.down_bias,
        }


def _gates_first(rows: Tensor) -> Tensor:
    """[experts, 2 * inner, size], gates and ups in turn -> [experts * 2 * inner, size], the gates
    of an expert before its ups."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 2)


class GptOssForCausalLM(MixtralForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def attention_class(cls, config: ModelConfig) -> type[Attention]:
        return GptOssAttention

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        assert isinstance(config, GptOssConfig)
        return GptOssBlock(config)

    def checkpoint_name(self, name: str) -> str | None:
        """A plain bank of experts is a weight under its module's name."""
        return super().checkpoint_name(f"{name}.weight" if _BANK.search(name) else name)
