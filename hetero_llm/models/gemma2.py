"""Gemma 2 (Gemma team 2024): Gemma with norms around attention and MLP, and a soft cap on the
logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hetero_llm.models.blocks import Attention, DecoderLayer, GatedMLP, LayerNames, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.gemma import Gemma2Config
from hetero_llm.models.gemma import GemmaForCausalLM
from hetero_llm.models.layers import Activation, Attend, GemmaRMSNorm, checkpoint_views
from hetero_llm.models.rotary import StepRotary


class Gemma2Layer(DecoderLayer):
    """Attention and gated MLP, each between two norms and added to the residual."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps = config.hidden_size, config.norm_eps
        super().__init__(
            GemmaRMSNorm(size, eps),
            Attention(config, index),
            GemmaRMSNorm(size, eps),
            GatedMLP(config),
        )
        self.post_attention_norm = GemmaRMSNorm(size, eps)
        self.post_mlp_norm = GemmaRMSNorm(size, eps)

    def forward(self, rotary: StepRotary, attend: Attend, *terms: Any) -> tuple[Tensor, ...]:
        assert self.mlp_norm is not None
        x, residual = self.attention_norm(*terms)
        x = self.post_attention_norm(self.attention(x, rotary, attend))[0]
        residual = attend.select(self.attention.layer, residual)
        x, residual = self.mlp_norm(x, residual)
        return self.post_mlp_norm(self.mlp(x))[0], residual

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        return {
            **super().checkpoint_tensors(prefix, names),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **checkpoint_views(f"{prefix}.post_feedforward_layernorm", self.post_mlp_norm),
        }


class Gemma2ForCausalLM(GemmaForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(norms=("input_layernorm", "pre_feedforward_layernorm"))

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Gemma2Config)
        self.final_softcap = config.final_softcap
        self.tanh = Activation("tanh")

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return Gemma2Layer(config, index)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if self.final_softcap is None:
            return logits
        return self.tanh(logits.div_(self.final_softcap)).mul_(self.final_softcap)
