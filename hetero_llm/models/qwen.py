"""The first Qwen ("Qwen Technical Report", Bai et al. 2023, and its remote code): Llama by other
names, with a fused projection; queries beyond the trained context may be scaled by log n."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetero_llm.models.blocks import Attention, LayerNames, ModelNames
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.qwen import QWenConfig
from hetero_llm.models.llama import LlamaForCausalLM
from hetero_llm.models.rotary import StepRotary


class LogNAttention(Attention):
    """Queries beyond the trained context are scaled, see `query_scales`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.register_buffer("scales", None, persistent=False)
        self.scales: Tensor  # of `query_scales`, one tensor for all layers

    def project(self, x: Tensor, rotary: StepRotary) -> Tensor:
        qkv = self.qkv_proj(x)
        scales = self.scales[rotary.positions].to(qkv.dtype)
        # Before the rotation, which is linear.
        qkv[:, : self.head_counts[0] * self.head_dim].mul_(scales)
        return qkv


def query_scales(length: int, max_model_len: int) -> Tensor:
    """[max_model_len, 1] float32: log n to the base `length` at position n - 1, at least 1
    ("Overcoming a Theoretical Limitation of Self-Attention", Chiang and Cholak 2022)."""
    counts = torch.arange(1, max_model_len + 1, dtype=torch.float32)
    return (counts.log() / math.log(length)).clamp_(min=1.0).unsqueeze(1)


class QWenLMHeadModel(LlamaForCausalLM):
    """See `CausalLM`."""

    names = ModelNames("transformer", "wte", "h", "ln_f")
    layer_names = LayerNames(
        norms=("ln_1", "ln_2"),
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_in=("mlp.w2", "mlp.w1"),  # the gate is w2
        mlp_out="mlp.c_proj",
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.attention_class(config) is LogNAttention:
            assert isinstance(config, QWenConfig) and config.logn_length is not None
            scales = query_scales(config.logn_length, config.max_model_len)
            for module in self.modules():
                if isinstance(module, LogNAttention):
                    module.scales = scales

    @classmethod
    def attention_class(cls, config: ModelConfig) -> type[Attention]:
        assert isinstance(config, QWenConfig)
        length = config.logn_length
        return Attention if length is None or config.max_model_len <= length else LogNAttention

    def checkpoint_name(self, name: str) -> str | None:
        # A constant that old checkpoints stored as a buffer.
        return None if name.endswith(".attn.masked_bias") else super().checkpoint_name(name)
