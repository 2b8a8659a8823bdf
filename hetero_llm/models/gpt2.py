"""GPT-2: learned positions, layer norms before, plain MLP, weights stored transposed."""

from __future__ import annotations

import re

from torch import Tensor, nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import (
    Activation,
    Attend,
    CausalLM,
    Embedding,
    LayerNorm,
    Linear,
    checkpoint_views,
)

# Causal masks that old checkpoints stored as buffers.
_STORED_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")


class GPT2Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_shape = (-1, 3 * config.num_heads, config.head_dim)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm(hidden, config.norm_eps)
        self.qkv_proj = Linear(hidden, 3 * hidden, bias=config.qkv_bias)
        self.out_proj = Linear(hidden, hidden, bias=config.out_bias)
        self.mlp_norm = LayerNorm(hidden, config.norm_eps)
        self.fc1 = Linear(hidden, inner, bias=config.mlp_bias)
        self.activation = Activation(config.hidden_act)
        self.fc2 = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        heads = self.qkv_proj(self.attention_norm(x)).view(self.head_shape)
        q, k, v = heads.chunk(3, dim=1)
        x = self.out_proj(attend(self.layer, q, k, v).flatten(1)).add_(x)
        return self.fc2(self.activation(self.fc1(self.mlp_norm(x)))).add_(x)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`."""
        return {
            **checkpoint_views(f"{prefix}.ln_1", self.attention_norm),
            **_transposed_views(f"{prefix}.attn.c_attn", self.qkv_proj),
            **_transposed_views(f"{prefix}.attn.c_proj", self.out_proj),
            **checkpoint_views(f"{prefix}.ln_2", self.mlp_norm),
            **_transposed_views(f"{prefix}.mlp.c_fc", self.fc1),
            **_transposed_views(f"{prefix}.mlp.c_proj", self.fc2),
        }


def _transposed_views(prefix: str, linear: Linear) -> dict[str, Tensor]:
    """GPT-2's Conv1D stores [in, out]."""
    assert linear.bias is not None
    return {f"{prefix}.weight": linear.weight.t(), f"{prefix}.bias": linear.bias}


class GPT2LMHeadModel(CausalLM):
    """See `CausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(GPT2Layer(config, i) for i in range(config.num_layers))
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = {
            **checkpoint_views("transformer.wte", self.embed_tokens),
            **checkpoint_views("transformer.wpe", self.embed_positions),
            **checkpoint_views("transformer.ln_f", self.final_norm),
        }
        if not self.config.tie_word_embeddings:
            tensors.update(checkpoint_views("lm_head", self.lm_head))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, GPT2Layer)
            tensors.update(layer.checkpoint_tensors(f"transformer.h.{i}"))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        """Checkpoints of the bare model lack the `transformer.` prefix."""
        if name == "lm_head.weight":
            return None if self.config.tie_word_embeddings else name
        full = name if name.startswith("transformer.") else f"transformer.{name}"
        return None if _STORED_MASK.fullmatch(full) else full
