"""OPT (Zhang et al. 2022): learned positions, layer norms before or after attention and MLP, plain
MLP; OPT-350m's embeddings are narrower than its hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hetero_llm.models.blocks import (
    MLP,
    Attention,
    DecoderLayer,
    DecoderLM,
    LayerNames,
    ModelNames,
    PlainMLP,
    Tensors,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import (
    AddLayerNorm,
    Attend,
    Embedding,
    Linear,
    RearrangedView,
    checkpoint_views,
)
from hetero_llm.models.rotary import StepRotary

# OPT was trained with two rows kept for padding in front of position 0.
_POSITION_OFFSET = 2


class PostNormLayer(DecoderLayer):
    """Attention and MLP, each added to its input and then normed."""

    def forward(self, rotary: StepRotary, attend: Attend, *terms: Any) -> tuple[Tensor, ...]:
        assert self.mlp_norm is not None
        x = terms[0]  # norms overwrite it
        attended = self.attention(x, rotary, attend)
        x, _ = self.attention_norm(attended, attend.select(self.attention.layer, x))
        x, _ = self.mlp_norm(self.mlp(x), x)
        return (x,)


class NoNorm(nn.Module):
    """In the place of the final norm: adds only."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum, twice; see `AddLayerNorm`."""
        total = x if residual is None else residual.add_(x)
        return total, total


class OPTForCausalLM(DecoderLM):
    """See `CausalLM`."""

    names = ModelNames("model.decoder", norm="final_layer_norm")
    layer_names = LayerNames(
        norms=("self_attn_layer_norm", "final_layer_norm"),
        out="self_attn.out_proj",
        mlp_in=("fc1",),
        mlp_out="fc2",
    )
    first_parts = ("embed_tokens", "embed_positions", "project_in")
    last_parts = ("norm", "lm_head", "project_out")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, word = config.hidden_size, config.word_embed_size
        self.embed_positions = Embedding(config.max_position_embeddings, hidden)
        projects = word != hidden
        self.project_in = Linear(word, hidden, bias=False) if projects else None
        self.project_out = Linear(hidden, word, bias=False) if projects else None
        if not config.final_norm:
            self.norm = NoNorm()

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        layer_class = DecoderLayer if config.pre_norm else PostNormLayer
        return layer_class(
            self.make_norm(config),
            Attention(config, index),
            self.make_norm(config),
            self.make_mlp(config, index),
        )

    def make_norm(self, config: ModelConfig) -> nn.Module:
        return AddLayerNorm(config.hidden_size, config.norm_eps, affine=config.norm_affine)

    def make_mlp(self, config: ModelConfig, index: int) -> MLP:
        return PlainMLP(config)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        return x + self.embed_positions(positions)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return self.lm_head(hidden)

    def head_modules(self) -> tuple[nn.Module, ...]:
        return tuple(one for one in (self.project_out, self.lm_head) if one is not None)

    def checkpoint_tensors(self) -> Tensors:
        decoder, tensors = self.names.model, super().checkpoint_tensors()
        for positions in self.embed_positions.parameters():
            stored_shape = (positions.shape[0] + _POSITION_OFFSET, positions.shape[1])
            tensors[f"{decoder}.embed_positions.weight"] = RearrangedView(
                positions, stored_shape, lambda stored: stored[_POSITION_OFFSET:]
            )
        for name in ("project_in", "project_out"):
            module = getattr(self, name)
            if module is not None:
                tensors.update(checkpoint_views(f"{decoder}.{name}", module))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        """Checkpoints of the bare decoder lack the `model.` prefix."""
        name = f"model.{name}" if name.startswith("decoder.") else name
        return super().checkpoint_name(name)
