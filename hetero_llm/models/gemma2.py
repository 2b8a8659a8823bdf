"""Gemma2: Gemma with norms around attention and MLP, and a soft cap on the logits."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.gemma2 import Gemma2Config
from hetero_llm.models.gemma import GemmaForCausalLM, GemmaLayer
from hetero_llm.models.layers import (
    Activation,
    Attend,
    GemmaRMSNorm,
    Place,
    checkpoint_views,
)
from hetero_llm.models.llama import LlamaLayer
from hetero_llm.models.rotary import RotaryRows


class Gemma2Layer(GemmaLayer):
    """Attention and gated MLP, each between two norms and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_mlp_norm = GemmaRMSNorm(config.hidden_size, config.norm_eps)
        self.post_mlp_norm = GemmaRMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        residual: Tensor | None,  # [T, hidden], overwritten
        rotary: RotaryRows,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm(x, residual)
        x = self.o_proj(self.attention(x, rotary, attend).flatten(1))
        x = self.post_attention_norm(x, None)[0]

        x, residual = self.pre_mlp_norm(x, residual)
        x = self.down_proj(self.activation(self.gate_up_proj(x)))
        return self.post_mlp_norm(x, None)[0], residual

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        return {
            **super().checkpoint_tensors(prefix),
            **checkpoint_views(f"{prefix}.pre_feedforward_layernorm", self.pre_mlp_norm),
            **checkpoint_views(f"{prefix}.post_feedforward_layernorm", self.post_mlp_norm),
        }


class Gemma2ForCausalLM(GemmaForCausalLM):
    """See `CausalLM`."""

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        return Gemma2Layer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Gemma2Config)
        self.final_softcap = config.final_softcap
        self.tanh = Activation("tanh")

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if self.final_softcap is None:
            return logits
        return self.tanh(logits.div_(self.final_softcap)).mul_(self.final_softcap)
