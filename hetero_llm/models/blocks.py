"""What the families with layer norms are made of: attention, MLPs, a layer, a whole model.

A family adds the names of its tensors and what is its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import (
    Activation,
    AddLayerNorm,
    Attend,
    CausalLM,
    Embedding,
    GatedActivation,
    Linear,
    Place,
    RotaryHeads,
    checkpoint_views,
    split_views,
)
from hetero_llm.models.rotary import RotaryEmbedding, RotaryRows

Tensors = dict[str, Tensor | Place]

# Causal masks and rotary frequencies that old checkpoints stored as buffers.
_STORED_BUFFER = re.compile(
    r"\.(attn|attention|self_attn|self_attention)"
    r"\.(bias|masked_bias|rotary_emb\.(inv_freq|cos_cached|sin_cached))$"
)


class HeadLayerNorm(nn.Module):
    """Layer norm of every query and key head, each with its own weight."""

    def __init__(self, config: ModelConfig, *, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.normed = config.num_heads + config.num_kv_heads
        self.eps = config.norm_eps
        size = self.normed * config.head_dim
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, qkv: Tensor) -> Tensor:
        """Norms queries and keys of a fused projection [T, rows] in place and returns it."""
        heads = qkv.view(len(qkv), -1, self.head_dim)[:, : self.normed]
        # In float32 up to the one rounding at the end, as a layer norm with one weight does it.
        normed = F.layer_norm(heads.float(), (self.head_dim,), None, None, self.eps)
        normed = normed * self.weight.view(self.normed, -1)
        if self.bias is not None:
            normed = normed + self.bias.view(self.normed, -1)
        heads.copy_(normed)
        return qkv

    def split(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the weight or the bias: queries' [heads, head_dim], keys' [kv_heads, ...]."""
        queries, keys = parameter.view(self.normed, -1).split(
            (self.num_heads, self.normed - self.num_heads)
        )
        return queries, keys


class FusedAttention(nn.Module):
    """One projection for queries, keys and values, rotary embedding if the family has one,
    attention, output projection.

    `head_norm`: see `HeadLayerNorm`.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, head_norm: HeadLayerNorm | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = sum(self.head_counts) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.head_norm = head_norm
        self.heads = RotaryHeads(config) if config.rope is not None else None
        self.out_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.out_bias
        )

    def forward(self, x: Tensor, rotary: RotaryRows | None, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden]; `rotary` is None without a rotary embedding."""
        qkv = self.qkv_proj(x)
        if self.head_norm is not None:
            qkv = self.head_norm(qkv)
        if self.heads is None:
            q, k, v = qkv.view(len(qkv), -1, self.head_dim).split(self.head_counts, dim=1)
            attended = attend(self.layer, q, k, v)
        else:
            assert rotary is not None
            attended = attend.rotary(self.layer, qkv, self.heads, rotary)
        return self.out_proj(attended.flatten(1))

    def split_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Checkpoint names of three projections (weights and biases) -> views."""
        sizes = [count * self.head_dim for count in self.head_counts]
        return split_views(self.qkv_proj, list(names), sizes)

    def grouped_tensors(self, name: str) -> Tensors:
        """Checkpoint names -> places of a projection stored as [kv_heads, group + 2, head_dim]
        rows: a KV head's queries, its keys, its values."""
        heads, kv_heads, _ = self.head_counts
        if kv_heads == 1:  # our own order
            return {**checkpoint_views(name, self.qkv_proj)}
        group = heads // kv_heads

        def arrange(stored: Tensor) -> Tensor:
            grouped = stored.view(kv_heads, group + 2, self.head_dim, *stored.shape[1:])
            parts = grouped.split((group, 1, 1), dim=1)
            return torch.cat([part.reshape(-1, *stored.shape[1:]) for part in parts])

        return {
            f"{name}.{key}": Place(parameter, tuple(parameter.shape), arrange)
            for key, parameter in self.qkv_proj.named_parameters()
        }


class PlainMLP(nn.Module):
    """Two projections with an activation in between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.fc1 = Linear(hidden, inner, bias=config.mlp_bias)
        self.activation = Activation(config.hidden_act)
        self.fc2 = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.fc2(self.activation(self.fc1(x)))

    def tensors(self, first: str, second: str) -> dict[str, Tensor]:
        """Checkpoint names -> views."""
        return {**checkpoint_views(first, self.fc1), **checkpoint_views(second, self.fc2)}


class GatedMLP(nn.Module):
    """activation(gate) * up between two projections, the first one fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.activation = GatedActivation(config.hidden_act)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names -> views."""
        inner = self.down_proj.weight.shape[1]
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return {
            **split_views(self.gate_up_proj, names, [inner, inner]),
            **checkpoint_views(f"{prefix}.down_proj", self.down_proj),
        }


class DecoderLayer(nn.Module):
    """Attention and MLP behind layer norms, one after the other or side by side.

    Args:
        config: Of the model.
        attention, mlp: Of this layer.
        parallel: Both read the layer's input.
        shared_norm: Of parallel layers: one norm serves both.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: FusedAttention,
        mlp: PlainMLP | GatedMLP,
        *,
        parallel: bool = False,
        shared_norm: bool = False,
    ) -> None:
        super().__init__()
        assert parallel or not shared_norm
        self.parallel = parallel
        size, eps, affine = config.hidden_size, config.norm_eps, config.norm_affine
        self.attention_norm = AddLayerNorm(size, eps, affine=affine)
        self.attention = attention
        self.mlp_norm = None if shared_norm else AddLayerNorm(size, eps, affine=affine)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        residual: Tensor | None,  # [T, hidden], overwritten
        extra: Tensor | None,  # [T, hidden]
        rotary: RotaryRows | None,
        attend: Attend,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Output of the MLP, residual, and attention's output if that, too, is still to be added
        to the residual: the next layer's `x`, `residual` and `extra`."""
        if self.parallel and self.mlp_norm is not None:
            normed, for_mlp, residual = self.attention_norm.with_second(
                self.mlp_norm, x, residual, extra
            )
        else:
            normed, residual = self.attention_norm(x, residual, extra)
            for_mlp = normed
        attended = self.attention(normed, rotary, attend)
        if self.parallel:
            return self.mlp(for_mlp), residual, attended
        assert self.mlp_norm is not None
        normed, residual = self.mlp_norm(attended, residual)
        return self.mlp(normed), residual, None

    def norm_tensors(self, first: str, second: str) -> dict[str, Tensor]:
        """Checkpoint names of the two norms, or of the shared one, -> views."""
        views = checkpoint_views(first, self.attention_norm)
        if self.mlp_norm is not None:
            views.update(checkpoint_views(second, self.mlp_norm))
        return views


@dataclass(frozen=True, slots=True)
class OuterNames:
    """Checkpoint names of what is outside the layers.

    Attributes:
        model: Prefix of all but the head's; checkpoints of the bare model lack it.
        embed, layers, final_norm: Below that prefix.
        head: Of the language model's head.
    """

    model: str
    embed: str
    layers: str
    final_norm: str
    head: str = "lm_head"


class LayerNormLM(CausalLM):
    """Embedding, decoder layers, final norm and head.

    Args:
        config: Of the model; has a rotary table if `config.rope` is set.
        layers: One a layer, in order.
        head_bias: The head adds a bias.
    """

    names: OuterNames

    def __init__(
        self, config: ModelConfig, layers: Iterable[DecoderLayer], *, head_bias: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = (
            None if config.rope is None else RotaryEmbedding(config.rope, config.max_model_len)
        )
        self.layers = nn.ModuleList(layers)
        self.final_norm = AddLayerNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=head_bias)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] int64 each -> [T, hidden], a tensor of its own."""
        return self.embed_tokens(input_ids)

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        """See `CausalLM.checkpoint_tensors`; `prefix` is the layer's, without a final dot."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(input_ids, positions)
        residual: Tensor | None = None
        extra: Tensor | None = None
        rotary = None if self.rotary is None else RotaryRows(self.rotary, positions, x.dtype)
        for layer in self.layers:
            x, residual, extra = layer(x, residual, extra, rotary, attend)
        return self.final_norm(x, residual, extra)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> Tensors:
        names = self.names
        tensors: Tensors = {
            **checkpoint_views(f"{names.model}.{names.embed}", self.embed_tokens),
            **checkpoint_views(f"{names.model}.{names.final_norm}", self.final_norm),
            **checkpoint_views(names.head, self.lm_head),
        }
        if self.config.tie_word_embeddings:
            del tensors[f"{names.head}.weight"]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors.update(self.layer_tensors(layer, f"{names.model}.{names.layers}.{i}"))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        """Names of the bare model get its prefix; stored masks and frequencies are skipped."""
        names = self.names
        if name.startswith(f"{names.head}."):
            tied = self.config.tie_word_embeddings and name == f"{names.head}.weight"
            return None if tied else name
        full = name if name.startswith(f"{names.model}.") else f"{names.model}.{name}"
        return None if _STORED_BUFFER.search(full) else full
