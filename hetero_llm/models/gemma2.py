"""Gemma 2 (Gemma team 2024): Gemma with norms around attention and MLP, and a soft cap on the
logits."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import DecoderLayer, LayerNames
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.gemma import Gemma2Config
from hetero_llm.models.gemma import GemmaForCausalLM
from hetero_llm.models.layers import Activation


class Gemma2ForCausalLM(GemmaForCausalLM):
    """See `CausalLM`."""

    layer_names = LayerNames(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Gemma2Config)
        self.final_softcap = config.final_softcap
        self.tanh = Activation("tanh")

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return self.sandwich_layer(config, index)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if self.final_softcap is None:
            return logits
        return self.tanh(logits.div_(self.final_softcap)).mul_(self.final_softcap)
