"""OPT: learned positions, layer norms before or after, plain MLP."""

from __future__ import annotations

from torch import Tensor, nn

from hetero_llm.models.blocks import FusedAttention, PlainMLP, Tensors
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import (
    AddLayerNorm,
    Attend,
    CausalLM,
    Embedding,
    Linear,
    Place,
    checkpoint_views,
)

# OPT was trained with two rows kept for padding in front of position 0.
_POSITION_OFFSET = 2


class OPTLayer(nn.Module):
    """Attention and MLP with a residual around each; the norms' place depends on `pre_norm`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        size, eps, affine = config.hidden_size, config.norm_eps, config.norm_affine
        self.attention_norm = AddLayerNorm(size, eps, affine=affine)
        self.attention = FusedAttention(config, layer)
        self.mlp_norm = AddLayerNorm(size, eps, affine=affine)
        self.mlp = PlainMLP(config)

    def forward(
        self,
        x: Tensor,  # [T, hidden], overwritten
        residual: Tensor | None,  # [T, hidden], overwritten; None with norms after
        attend: Attend,
    ) -> tuple[Tensor, Tensor | None]:
        """The output; with norms before it is still to be added to the residual, which follows."""
        if self.pre_norm:
            x, residual = self.attention_norm(x, residual)
            x, residual = self.mlp_norm(self.attention(x, None, attend), residual)
            return self.mlp(x), residual
        x, _ = self.attention_norm(self.attention(x, None, attend), x)
        x, _ = self.mlp_norm(self.mlp(x), x)
        return x, None

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`."""
        attention = f"{prefix}.self_attn"
        return {
            **checkpoint_views(f"{prefix}.self_attn_layer_norm", self.attention_norm),
            **checkpoint_views(f"{prefix}.final_layer_norm", self.mlp_norm),
            **self.attention.split_tensors([f"{attention}.{name}_proj" for name in "qkv"]),
            **checkpoint_views(f"{attention}.out_proj", self.attention.out_proj),
            **self.mlp.tensors(f"{prefix}.fc1", f"{prefix}.fc2"),
        }


class OPTForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, word = config.hidden_size, config.word_embed_size
        self.embed_tokens = Embedding(config.vocab_size, word)
        self.embed_positions = Embedding(config.max_position_embeddings, hidden)
        projects = word != hidden
        self.project_in = Linear(word, hidden, bias=False) if projects else None
        self.layers = nn.ModuleList(OPTLayer(config, i) for i in range(config.num_layers))
        self.final_norm = (
            AddLayerNorm(hidden, config.norm_eps, affine=config.norm_affine)
            if config.final_norm
            else None
        )
        self.project_out = Linear(hidden, word, bias=False) if projects else None
        self.lm_head = Linear(word, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(positions)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, attend)
        if self.final_norm is not None:
            return self.final_norm(x, residual)[0]
        return x if residual is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> Tensors:
        decoder = "model.decoder"
        positions = self.embed_positions.weight
        stored_shape = (positions.shape[0] + _POSITION_OFFSET, positions.shape[1])
        tensors: Tensors = {
            **checkpoint_views(f"{decoder}.embed_tokens", self.embed_tokens),
            f"{decoder}.embed_positions.weight": Place(
                positions, stored_shape, lambda stored: stored[_POSITION_OFFSET:]
            ),
        }
        for name in ("project_in", "project_out"):
            module = getattr(self, name)
            if module is not None:
                tensors.update(checkpoint_views(f"{decoder}.{name}", module))
        if self.final_norm is not None:
            tensors.update(checkpoint_views(f"{decoder}.final_layer_norm", self.final_norm))
        if not self.config.tie_word_embeddings:
            tensors.update(checkpoint_views("lm_head", self.lm_head))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, OPTLayer)
            tensors.update(layer.checkpoint_tensors(f"{decoder}.layers.{i}"))
        return tensors

    def checkpoint_name(self, name: str) -> str | None:
        """Checkpoints of the bare decoder lack the `model.` prefix."""
        if name == "lm_head.weight":
            return None if self.config.tie_word_embeddings else name
        return f"model.{name}" if name.startswith("decoder.") else name
