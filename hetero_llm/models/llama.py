"""Llama. Mistral, Qwen2 and Qwen3 are the same module with other flags in `ModelConfig`; other
families choose their own `layer_class`, or store the same weights under other names."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import (
    Attend,
    CausalLM,
    Embedding,
    GatedActivation,
    GemmaRMSNorm,
    Linear,
    Place,
    RMSNorm,
    RotaryHeads,
    checkpoint_views,
    split_views,
)
from hetero_llm.models.rotary import RotaryEmbedding, RotaryRows


class LlamaLayer(nn.Module):
    """Attention and gated MLP, each after a norm and added to the residual."""

    norm_class: type[RMSNorm] | type[GemmaRMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        all_heads = config.num_heads + 2 * config.num_kv_heads
        self.input_norm = self.norm_class(hidden, config.norm_eps)
        self.qkv_proj = Linear(hidden, all_heads * head_dim, bias=config.qkv_bias)
        self.heads = RotaryHeads(config)
        self.o_proj = Linear(config.num_heads * head_dim, hidden, bias=config.out_bias)
        self.post_attention_norm = self.norm_class(hidden, config.norm_eps)
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.activation = GatedActivation(config.hidden_act)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        residual: Tensor | None,  # [T, hidden], overwritten
        rotary: RotaryRows,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output, not yet added to the residual, and the residual."""
        x, residual = self.input_norm(x, residual)
        x = self.o_proj(self.attention(x, rotary, attend).flatten(1))

        x, residual = self.post_attention_norm(x, residual)
        return self.down_proj(self.activation(self.gate_up_proj(x))), residual

    def attention(self, x: Tensor, rotary: RotaryRows, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, heads, head_dim]."""
        return attend.rotary(self.layer, self.qkv_proj(x), self.heads, rotary)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor | Place]:
        """See `CausalLM.checkpoint_tensors`."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_rows = self.num_heads * self.head_dim
        kv_rows = self.num_kv_heads * self.head_dim
        tensors: dict[str, Tensor | Place] = {
            **checkpoint_views(f"{prefix}.input_layernorm", self.input_norm),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **split_views(
                self.qkv_proj,
                [f"{attention}.{name}_proj" for name in "qkv"],
                [q_rows, kv_rows, kv_rows],
            ),
            **checkpoint_views(f"{attention}.o_proj", self.o_proj),
            **split_views(
                self.gate_up_proj,
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                [self.down_proj.weight.shape[1]] * 2,
            ),
            **checkpoint_views(f"{mlp}.down_proj", self.down_proj),
        }
        norm = self.heads.qk_norm
        if norm is not None:
            tensors[f"{attention}.q_norm.weight"] = norm.q_weight
            tensors[f"{attention}.k_norm.weight"] = norm.k_weight
        return tensors


class CheckpointNames(NamedTuple):
    """What a family's checkpoints call the parts of a model."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


class LlamaForCausalLM(CausalLM):
    """See `CausalLM`."""

    names = CheckpointNames()

    @classmethod
    def layer_class(cls, config: ModelConfig) -> type[LlamaLayer]:
        """The layers of such a model. The native CPU executor looks at them to see whether it can
        run it."""
        return LlamaLayer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layer_class = self.layer_class(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len)
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_layers))
        self.norm = layer_class.norm_class(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rotary = RotaryRows(self.rotary, positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attend)
        return self.norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, Tensor | Place]:
        names = self.names
        tensors: dict[str, Tensor | Place] = {
            **checkpoint_views(names.embedding, self.embed_tokens),
            **checkpoint_views(names.norm, self.norm),
        }
        if not self.config.tie_word_embeddings:
            tensors.update(checkpoint_views(names.head, self.lm_head))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            tensors.update(layer.checkpoint_tensors(f"{names.layers}.{i}"))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        # Frequencies, which old checkpoints stored as buffers.
        if name.endswith((".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")):
            return None
        if name == f"{self.names.head}.weight" and self.config.tie_word_embeddings:
            return None
        return name
