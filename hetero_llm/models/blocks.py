"""What native families are made of: attention, MLPs, a decoder layer, a whole model.

A family's file states what differs from Llama: the names in its checkpoints (`ModelNames`,
`LayerNames`) and the methods of `DecoderLM` that it overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.layers import (
    Activation,
    AddLayerNorm,
    Attend,
    CausalLM,
    Embedding,
    GatedActivation,
    GemmaRMSNorm,
    Head,
    Linear,
    ProjectionNorm,
    QKNorm,
    RearrangedView,
    RMSNorm,
    RotaryHeads,
    checkpoint_views,
    split_views,
)
from hetero_llm.models.rank_config import head_rows
from hetero_llm.models.rotary import RotaryEmbedding, StepRotary, half_split_order

Tensors = dict[str, Tensor | RearrangedView]
NormClass = type[RMSNorm] | type[GemmaRMSNorm] | type[AddLayerNorm]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Checkpoint names of what is outside the layers.

    Attributes:
        model: Prefix of everything except the head.
        embed, layers, norm: Names below that prefix.
        head: Full name of the language model's head.
    """

    model: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Checkpoint names of a layer's tensors below the layer's prefix, and the order of their rows.

    Attributes:
        norms: The attention's norm and the MLP's, unless both share one.
        post_norms: The norms behind them, of a `SandwichLayer`.
        qkv: The projections of queries, keys and values, or the one that holds all three.
        qk_norm: Norms of query and key heads (`ModelConfig.qk_norm`).
        out: The attention's output projection.
        mlp_in: The MLP's gate and up projections, or its only (or fused) input projection.
        mlp_out: The MLP's output projection.
        mixture: Where a mixture has its router ("gate") and its "experts".
        expert: An expert's gate, up and down projections.
        correction: That of a router that corrects its choice (`SigmoidRouter`), in the mixture.
        qkv_by_kv_head: Rows of the fused projection are [kv_heads, group + 2, head_dim]: a KV
            head's queries, its key, its value.
        rotates_neighbours: Entry 2i of a head is rotated with entry 2i + 1, where `RotaryHeads`
            rotates entry i with entry i + half; the rows are reordered when they are loaded.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] = ("post_self_attn_layernorm", "post_mlp_layernorm")
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    mixture: str = "block_sparse_moe"
    expert: tuple[str, str, str] = ("w1", "w3", "w2")
    correction: str = "e_score_correction_bias"
    qkv_by_kv_head: bool = False
    rotates_neighbours: bool = False


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


class Attention(nn.Module):
    """One projection for queries, keys and values, rotary embedding if the model has one,
    attention, output projection.

    `head_norm`: of a fused projection's queries and keys, before `RotaryHeads`, of which
    `ModelConfig.qk_norm` is part.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        head_norm: HeadLayerNorm | ProjectionNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = sum(self.head_counts) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.head_norm = head_norm
        self.heads = None if config.rope is None else RotaryHeads(config)
        self.rotary_dim = 0 if config.rope is None else config.rope.rotary_dim
        self.out_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.out_bias
        )

    def forward(self, x: Tensor, rotary: StepRotary, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden], or those rows of it that `attend.select` leaves."""
        qkv = self.project(x, rotary)
        if self.heads is None:
            q, k, v = qkv.view(len(qkv), -1, self.head_dim).split(self.head_counts, dim=1)
            attended = attend(self.layer, q, k, v)
        else:
            attended = attend.rotary(self.layer, qkv, self.heads, rotary)
        return self.out_proj(attended.flatten(1))

    def project(self, x: Tensor, rotary: StepRotary) -> Tensor:
        """[T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim], not yet rotated."""
        qkv = self.qkv_proj(x)
        return qkv if self.head_norm is None else self.head_norm(qkv)

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        """See `CausalLM.checkpoint_tensors`; `prefix` is the layer's."""
        counts = self.head_counts if len(names.qkv) > 1 else (sum(self.head_counts),)
        sizes = [count * self.head_dim for count in counts]
        # How many heads of each stored projection are rotated: all queries and all keys.
        rotated = (*counts[:-1], 0) if len(counts) > 1 else (sum(self.head_counts[:2]),)
        tensors: Tensors = {}
        for key, parameter in self.qkv_proj.named_parameters():
            for name, count, view in zip(names.qkv, rotated, parameter.split(sizes), strict=True):
                target: Tensor | RearrangedView = view
                if names.qkv_by_kv_head and self.head_counts[1] > 1:
                    target = RearrangedView.of(view, self._from_kv_heads)
                elif names.rotates_neighbours and count:
                    target = RearrangedView.of(view, partial(self._from_neighbours, count))
                tensors[f"{prefix}.{name}.{key}"] = target
        norm: QKNorm | ProjectionNorm | None = None if self.heads is None else self.heads.qk_norm
        if norm is None and isinstance(self.head_norm, ProjectionNorm):
            norm = self.head_norm
        if norm is not None:
            for name, weight in zip(names.qk_norm, (norm.q_weight, norm.k_weight), strict=True):
                tensors[f"{prefix}.{name}.weight"] = weight
        return {**tensors, **checkpoint_views(f"{prefix}.{names.out}", self.out_proj)}

    def _from_kv_heads(self, stored: Tensor) -> Tensor:
        """See `LayerNames.qkv_by_kv_head`."""
        heads, kv_heads, _ = self.head_counts
        group = heads // kv_heads
        grouped = stored.view(kv_heads, group + 2, self.head_dim, *stored.shape[1:])
        parts = grouped.split((group, 1, 1), dim=1)
        return torch.cat([part.reshape(-1, *stored.shape[1:]) for part in parts])

    def _from_neighbours(self, rotated: int, stored: Tensor) -> Tensor:
        """See `LayerNames.rotates_neighbours`; the first `rotated` heads are reordered."""
        heads = stored.view(-1, self.head_dim, *stored.shape[1:])
        order = half_split_order(self.head_dim, self.rotary_dim)
        return torch.cat((heads[:rotated, order], heads[rotated:])).view(stored.shape)


class MLP(Protocol):
    """What follows the attention of a layer; a module."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        ...

    def checkpoint_tensors(
        self, prefix: str, names: LayerNames
    ) -> Mapping[str, Tensor | RearrangedView]:
        """See `CausalLM.checkpoint_tensors`; `prefix` is the layer's."""
        ...


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

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> dict[str, Tensor]:
        """See `MLP`."""
        return {
            **checkpoint_views(f"{prefix}.{names.mlp_in[0]}", self.fc1),
            **checkpoint_views(f"{prefix}.{names.mlp_out}", self.fc2),
        }


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with one product for gate and up.

    `inner`: Its width if that is not `intermediate_size`.
    """

    def __init__(self, config: ModelConfig, inner: int | None = None) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.activation = GatedActivation(config.hidden_act)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> dict[str, Tensor]:
        """See `MLP`."""
        stored = [f"{prefix}.{name}" for name in names.mlp_in]
        rows = self.gate_up_proj.weight.shape[0] // len(stored)
        return {
            **split_views(self.gate_up_proj, stored, [rows] * len(stored)),
            **checkpoint_views(f"{prefix}.{names.mlp_out}", self.down_proj),
        }


class DecoderLayer(nn.Module):
    """Attention and MLP behind norms, one after the other or side by side.

    Args:
        mlp_norm: None if the attention's norm serves the MLP too, which only parallel layers allow.
        parallel: Attention and MLP both read the layer's input; with two norms both are
            `AddLayerNorm`.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module | None,
        mlp: MLP,
        *,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        assert parallel or mlp_norm is not None
        self.parallel = parallel
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, rotary: StepRotary, attend: Attend, *terms: Any) -> tuple[Tensor, ...]:
        """Runs the layer.

        Args:
            terms: [T, hidden] each: the output of the layer before, the residual (None in the first
                layer; overwritten) and, after a parallel layer, its attention's output. The first
                norm adds them up.

        Returns:
            The terms of the next layer or of the final norm, with the rows that `attend.select`
            leaves.
        """
        if self.parallel and self.mlp_norm is not None:
            assert isinstance(self.attention_norm, AddLayerNorm)
            assert isinstance(self.mlp_norm, AddLayerNorm)
            normed, mlp_input, residual = self.attention_norm.with_second(self.mlp_norm, *terms)
        else:
            normed, residual = self.attention_norm(*terms)
            mlp_input = normed
        attended = self.attention(normed, rotary, attend)
        residual = attend.select(self.attention.layer, residual)
        if self.mlp_norm is None or self.parallel:
            mlp_input = attend.select(self.attention.layer, mlp_input)
            return self.mlp(mlp_input), residual, attended
        normed, residual = self.mlp_norm(attended, residual)
        return self.mlp(normed), residual

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        """See `CausalLM.checkpoint_tensors`; `prefix` is the layer's, without a final dot."""
        tensors: Tensors = {}
        for name, norm in zip(names.norms, (self.attention_norm, self.mlp_norm), strict=False):
            if norm is not None:
                tensors.update(checkpoint_views(f"{prefix}.{name}", norm))
        return {
            **tensors,
            **self.attention.checkpoint_tensors(prefix, names),
            **self.mlp.checkpoint_tensors(prefix, names),
        }


class SandwichLayer(DecoderLayer):
    """Attention and MLP, each between two norms and added to the residual: "sandwich norm"
    ("CogView", Ding et al. 2021)."""

    def __init__(
        self,
        attention_norms: tuple[nn.Module, nn.Module],
        attention: Attention,
        mlp_norms: tuple[nn.Module, nn.Module],
        mlp: MLP,
    ) -> None:
        super().__init__(attention_norms[0], attention, mlp_norms[0], mlp)
        self.post_attention_norm = attention_norms[1]
        self.post_mlp_norm = mlp_norms[1]

    def forward(self, rotary: StepRotary, attend: Attend, *terms: Any) -> tuple[Tensor, ...]:
        assert self.mlp_norm is not None
        x, residual = self.attention_norm(*terms)
        x = self.post_attention_norm(self.attention(x, rotary, attend))[0]
        residual = attend.select(self.attention.layer, residual)
        x, residual = self.mlp_norm(x, residual)
        return self.post_mlp_norm(self.mlp(x))[0], residual

    def checkpoint_tensors(self, prefix: str, names: LayerNames) -> Tensors:
        tensors = super().checkpoint_tensors(prefix, names)
        post_norms = (self.post_attention_norm, self.post_mlp_norm)
        for name, norm in zip(names.post_norms, post_norms, strict=True):
            tensors.update(checkpoint_views(f"{prefix}.{name}", norm))
        return tensors


class OtherStage(nn.Module):
    """In the place of a module that another stage has."""


def _sum_of_terms(x: Any, residual: Any = None, extra: Any = None) -> Tensor:
    """[T, hidden]: the sum of a layer's terms, with the additions and roundings of the norm that
    would come next, so that the next stage computes what it would compute behind this layer.

    Args:
        x, residual, extra: see `AddLayerNorm.forward`.
    """
    if extra is not None:
        x = x + extra
    return x if residual is None else residual.add_(x)


class DecoderLM(CausalLM):
    """Embedding, decoder layers, final norm and head: Llama's, unless a family overrides them.

    The model of a stage (`config.rank`) has the layers of that stage; `leave_out_other_stages`
    takes from it what comes before or after them.

    Attributes:
        names, layer_names: What the family's checkpoints call the parts.
        norm_class: Of all norms.
        first_parts, last_parts: Modules of the first stage alone, and of the last one alone, but
            for a head that is the embedding's: both stages have those two.
    """

    names = ModelNames()
    layer_names = LayerNames()
    norm_class: NormClass = RMSNorm
    selects_rows = True
    first_parts: tuple[str, ...] = ("embed_tokens",)
    last_parts: tuple[str, ...] = ("norm", "lm_head")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.selects_rows = config.rank.is_last
        with self._memory_of("embed_tokens"):
            self.embed_tokens = Embedding(config.vocab_size, config.word_embed_size)
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len)
        self.layers = nn.ModuleList(self.make_layer(config, i) for i in range(config.num_layers))
        self.norm = self.make_norm(config)
        first, rows = head_rows(config.vocab_size, config.rank)
        with self._memory_of("lm_head"):
            self.lm_head = Head(config.word_embed_size, first, rows, bias=config.head_bias)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _memory_of(self, part: str) -> AbstractContextManager[object]:
        """A large module of another stage is made without memory, before it is left out."""
        return torch.device("meta") if part in self._parts_of_others() else nullcontext()

    def _parts_of_others(self) -> frozenset[str]:
        """Names of the modules that this stage does not have."""
        rank = self.config.rank
        others: set[str] = set()
        if not rank.is_first:
            others.update(self.first_parts)
        if not rank.is_last:
            others.update(self.last_parts)
        if self.config.tie_word_embeddings and (rank.is_first or rank.is_last):
            others -= {"embed_tokens", "lm_head"}
        return frozenset(others)

    def leave_out_other_stages(self) -> None:
        """Takes out the modules of other stages; call it once, right after construction."""
        for name in self._parts_of_others():
            if isinstance(getattr(self, name), nn.Module):
                setattr(self, name, OtherStage())

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return DecoderLayer(
            self.make_norm(config),
            self.attention_class(config)(config, index),
            self.make_norm(config),
            self.make_mlp(config, index),
        )

    def sandwich_layer(self, config: ModelConfig, index: int) -> SandwichLayer:
        """For families whose `make_layer` it is."""
        return SandwichLayer(
            (self.make_norm(config), self.make_norm(config)),
            self.attention_class(config)(config, index),
            (self.make_norm(config), self.make_norm(config)),
            self.make_mlp(config, index),
        )

    def make_norm(self, config: ModelConfig) -> nn.Module:
        """Called for every norm of [T, hidden]."""
        return self.norm_class(config.hidden_size, config.norm_eps)

    @classmethod
    def attention_class(cls, config: ModelConfig) -> type[Attention]:
        return Attention

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        """`index`: Of the layer."""
        return GatedMLP(config)

    def input_embedding(self) -> Embedding:
        return self.embed_tokens

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] int64 each -> [T, hidden], a tensor of its own."""
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(input_ids, positions) if self.config.rank.is_first else input_ids
        rotary = StepRotary(self.rotary, positions, x.dtype)
        terms: tuple[Tensor | None, ...] = (x, None)
        for layer in self.layers:
            terms = layer(rotary, attend, *terms)
        return self.norm(*terms)[0] if self.config.rank.is_last else _sum_of_terms(*terms)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> Tensors:
        names = self.names
        tensors: Tensors = {
            **checkpoint_views(f"{names.model}.{names.embed}", self.embed_tokens),
            **checkpoint_views(f"{names.model}.{names.norm}", self.norm),
            **checkpoint_views(names.head, self.lm_head),
        }
        if self.config.tie_word_embeddings:
            tensors.pop(f"{names.head}.weight", None)
        for i, layer in enumerate(self.layers, self.config.first_layer):
            assert isinstance(layer, DecoderLayer)
            tensors.update(self.layer_tensors(layer, f"{names.model}.{names.layers}.{i}"))
        return tensors

    def layer_tensors(self, layer: DecoderLayer, prefix: str) -> Tensors:
        """The part of `checkpoint_tensors` for one layer."""
        return layer.checkpoint_tensors(prefix, self.layer_names)

    def checkpoint_name(self, name: str) -> str | None:
        # Frequencies, which old checkpoints stored as buffers.
        if name.endswith((".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")):
            return None
        return None if self._is_tied_head(name) else name

    def layer_of(self, name: str) -> int | None:
        """The number of the layer, in the whole model, that a stored tensor belongs to; None: it
        belongs to none."""
        prefix = f"{self.names.model}.{self.names.layers}."
        number = name.removeprefix(prefix).partition(".")[0]
        return int(number) if name.startswith(prefix) and number.isdecimal() else None

    def in_stage(self, name: str) -> bool:
        """Whether a tensor of the whole model, by its name in `checkpoint_tensors` or that of a
        further tensor of the same module, is part of this stage."""
        config, names = self.config, self.names
        if config.rank.stages == 1:
            return True
        layer = self.layer_of(name)
        if layer is not None:
            return 0 <= layer - config.first_layer < config.num_layers
        prefix = f"{names.model}.{names.layers}."
        outer = (own for own in self.checkpoint_tensors() if not own.startswith(prefix))
        return any(name.startswith(own.rpartition(".")[0] + ".") for own in outer)

    def whole_name(self, parameter: str) -> str:
        """The name in the whole model of one of this stage's parameters or modules."""
        kind, _, rest = parameter.partition(".")
        number, dot, rest = rest.partition(".")
        if kind != "layers" or not number:
            return parameter
        return f"layers.{int(number) + self.config.first_layer}{dot}{rest}"

    def _is_tied_head(self, name: str) -> bool:
        return self.config.tie_word_embeddings and name == f"{self.names.head}.weight"


# Causal masks and rotary frequencies that old checkpoints stored as buffers.
_STORED_BUFFER = re.compile(
    r"\.(attn|attention|self_attn|self_attention)"
    r"\.(bias|masked_bias|rotary_emb\.(inv_freq|cos_cached|sin_cached))$"
)


class LayerNormLM(DecoderLM):
    """A family with layer norms and a plain MLP; `LayerNormConfig` says how layers are arranged.

    Attributes:
        head_norm_bias: Norms of query and key heads (`LayerNormConfig.qk_layer_norm`) have a bias.
    """

    norm_class: NormClass = AddLayerNorm
    head_norm_bias = False

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        assert isinstance(config, LayerNormConfig)
        head_norm = None
        if config.qk_layer_norm:
            head_norm = HeadLayerNorm(config, bias=self.head_norm_bias)
        return DecoderLayer(
            self.make_norm(config),
            Attention(config, index, head_norm=head_norm),
            None if config.shared_norm else self.make_norm(config),
            self.make_mlp(config, index),
            parallel=config.parallel,
        )

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        return PlainMLP(config)

    def checkpoint_name(self, name: str) -> str | None:
        """Names of the bare model get its prefix; stored masks and frequencies are skipped."""
        names = self.names
        if name.startswith(f"{names.head}."):
            return None if self._is_tied_head(name) else name
        full = name if name.startswith(f"{names.model}.") else f"{names.model}.{name}"
        return None if _STORED_BUFFER.search(full) else full
