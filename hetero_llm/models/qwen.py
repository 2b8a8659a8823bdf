"""QWen, the first one: Llama by other names, with a fused projection in its checkpoints; queries
beyond the trained context may be scaled by log n."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.qwen import QWenConfig
from hetero_llm.models.layers import Attend, Place, checkpoint_views, split_views
from hetero_llm.models.llama import CheckpointNames, LlamaForCausalLM, LlamaLayer
from hetero_llm.models.rotary import RotaryRows


class QWenLayer(LlamaLayer):
    """See `LlamaLayer`."""

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        inner = self.down_proj.weight.shape[1]
        mlp = f"{prefix}.mlp"
        return {
            **checkpoint_views(f"{prefix}.ln_1", self.input_norm),
            **checkpoint_views(f"{prefix}.attn.c_attn", self.qkv_proj),
            **checkpoint_views(f"{prefix}.attn.c_proj", self.o_proj),
            **checkpoint_views(f"{prefix}.ln_2", self.post_attention_norm),
            # The gate is w2.
            **split_views(self.gate_up_proj, [f"{mlp}.w2", f"{mlp}.w1"], [inner, inner]),
            **checkpoint_views(f"{mlp}.c_proj", self.down_proj),
        }


class LogNLayer(QWenLayer):
    """Queries beyond the trained context are scaled, see `query_scales`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.register_buffer("scales", None, persistent=False)
        self.scales: Tensor  # of `query_scales`, one for all layers

    def attention(self, x: Tensor, rotary: RotaryRows, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x)
        scales = self.scales[rotary.positions].to(qkv.dtype)
        # Before the rotation, which is linear.
        qkv[:, : self.num_heads * self.head_dim].mul_(scales)
        return attend.rotary(self.layer, qkv, self.heads, rotary)


def query_scales(length: int, max_model_len: int) -> Tensor:
    """[max_model_len, 1] float32: log n to the base `length` at position n - 1, at least 1
    ("Overcoming a Theoretical Limitation of Self-Attention", Chiang and Cholak 2022)."""
    counts = torch.arange(1, max_model_len + 1, dtype=torch.float32)
    return (counts.log() / math.log(length)).clamp_(min=1.0).unsqueeze(1)


class QWenLMHeadModel(LlamaForCausalLM):
    """See `CausalLM`."""

    names = CheckpointNames(
        embedding="transformer.wte", layers="transformer.h", norm="transformer.ln_f"
    )

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        assert isinstance(config, QWenConfig)
        length = config.logn_length
        return QWenLayer if length is None or config.max_model_len <= length else LogNLayer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.layer_class(config) is LogNLayer:
            assert isinstance(config, QWenConfig) and config.logn_length is not None
            scales = query_scales(config.logn_length, config.max_model_len)
            for layer in self.layers:
                layer.scales = scales

    def checkpoint_name(self, name: str) -> str | None:
        # A constant that old checkpoints stored as a buffer.
        return None if name.endswith(".attn.masked_bias") else super().checkpoint_name(name)
