"""Mixtral: Llama's attention, and experts instead of the MLP. Other mixtures differ in `make_layer`
and in the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixtral import MixtralConfig
from hetero_llm.models.experts import Experts, TopKRouter
from hetero_llm.models.layers import (
    AddLayerNorm,
    Attend,
    CausalLM,
    Embedding,
    Linear,
    RMSNorm,
    RotaryHeads,
    checkpoint_views,
    split_views,
)
from hetero_llm.models.rotary import RotaryEmbedding, RotaryRows


class MLP(Protocol):
    """What comes after the attention of a layer; a module."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        ...

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`; `prefix` is the layer's."""
        ...


class MixtralBlock(nn.Module):
    """A router and its experts."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self.router = TopKRouter(
            hidden, count, config.experts_per_token, renormalize=True, rounded=False
        )
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


class MixtralLayer(nn.Module):
    """Attention and `mlp`, each after a norm and added to the residual.

    Args:
        norm: Makes one.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mlp: MLP,
        *,
        norm: Callable[[int, float], RMSNorm | AddLayerNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        hidden, head_dim = config.hidden_size, config.head_dim
        all_heads = config.num_heads + 2 * config.num_kv_heads
        self.input_norm = norm(hidden, config.norm_eps)
        self.qkv_proj = Linear(hidden, all_heads * head_dim, bias=config.qkv_bias)
        self.heads = RotaryHeads(config)
        self.o_proj = Linear(config.num_heads * head_dim, hidden, bias=config.out_bias)
        self.post_attention_norm = norm(hidden, config.norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        residual: Tensor | None,  # [T, hidden], overwritten
        rotary: RotaryRows,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """The output of `mlp`, not yet added to the residual, and the residual."""
        x, residual = self.input_norm(x, residual)
        attended = attend.rotary(self.layer, self.qkv_proj(x), self.heads, rotary)
        x = self.o_proj(attended.flatten(1))

        x, residual = self.post_attention_norm(x, residual)
        return self.mlp(x), residual

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`."""
        attention = f"{prefix}.self_attn"
        q_rows = self.num_heads * self.head_dim
        kv_rows = self.num_kv_heads * self.head_dim
        return {
            **checkpoint_views(f"{prefix}.input_layernorm", self.input_norm),
            **checkpoint_views(f"{prefix}.post_attention_layernorm", self.post_attention_norm),
            **split_views(
                self.qkv_proj,
                [f"{attention}.{name}_proj" for name in "qkv"],
                [q_rows, kv_rows, kv_rows],
            ),
            **checkpoint_views(f"{attention}.o_proj", self.o_proj),
            **self.mlp.checkpoint_tensors(prefix),
        }


class MixtralForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config, MixtralConfig) and config.rope is not None
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len)
        self.layers = nn.ModuleList(self.make_layer(config, i) for i in range(config.num_layers))
        self.norm = self.make_norm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=self.head_bias(config))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def make_layer(self, config: MixtralConfig, layer: int) -> MixtralLayer:
        return MixtralLayer(config, layer, MixtralBlock(config))

    def make_norm(self, size: int, eps: float) -> RMSNorm | AddLayerNorm:
        return RMSNorm(size, eps)

    def head_bias(self, config: MixtralConfig) -> bool:
        return False

    def parameters_of_a_row(self) -> int:
        """A row visits some of the experts only."""
        assert isinstance(self.config, MixtralConfig)
        idle = 1 - self.config.experts_per_token / self.config.num_experts
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        held = sum(p.numel() for module in experts for p in module.parameters())
        return super().parameters_of_a_row() - int(idle * held)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rotary = RotaryRows(self.rotary, positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attend)
        return self.norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        head = checkpoint_views("lm_head", self.lm_head)
        if self.config.tie_word_embeddings:
            del head["lm_head.weight"]
        tensors = {
            **checkpoint_views("model.embed_tokens", self.embed_tokens),
            **checkpoint_views("model.norm", self.norm),
            **head,
        }
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, MixtralLayer)
            tensors.update(layer.checkpoint_tensors(f"model.layers.{i}"))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        if name.endswith(".rotary_emb.inv_freq"):
            return None
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return None
        return name
