"""OPT: learned positions, layer norms before or after, plain MLP."""

from __future__ import annotations

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
    split_views,
)

# OPT was trained with two rows kept for padding in front of position 0.
_POSITION_OFFSET = 2


class OPTLayer(nn.Module):
    """Attention and MLP with a residual around each; the norms' place depends on `pre_norm`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.pre_norm = config.pre_norm
        self.head_shape = (-1, 3 * config.num_heads, config.head_dim)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm(hidden, config.norm_eps, affine=config.norm_affine)
        self.qkv_proj = Linear(hidden, 3 * hidden, bias=config.qkv_bias)
        self.out_proj = Linear(hidden, hidden, bias=config.out_bias)
        self.mlp_norm = LayerNorm(hidden, config.norm_eps, affine=config.norm_affine)
        self.fc1 = Linear(hidden, inner, bias=config.mlp_bias)
        self.activation = Activation(config.hidden_act)
        self.fc2 = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        normed = self.attention_norm(x) if self.pre_norm else x
        q, k, v = self.qkv_proj(normed).view(self.head_shape).chunk(3, dim=1)
        x = self.out_proj(attend(self.layer, q, k, v).flatten(1)).add_(x)
        if not self.pre_norm:
            x = self.attention_norm(x)
        normed = self.mlp_norm(x) if self.pre_norm else x
        x = self.fc2(self.activation(self.fc1(normed))).add_(x)
        return x if self.pre_norm else self.mlp_norm(x)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`."""
        attention = f"{prefix}.self_attn"
        return {
            **checkpoint_views(f"{prefix}.self_attn_layer_norm", self.attention_norm),
            **checkpoint_views(f"{prefix}.final_layer_norm", self.mlp_norm),
            **split_views(
                self.qkv_proj,
                [f"{attention}.{name}_proj" for name in "qkv"],
                [self.out_proj.weight.shape[0]] * 3,
            ),
            **checkpoint_views(f"{attention}.out_proj", self.out_proj),
            **checkpoint_views(f"{prefix}.fc1", self.fc1),
            **checkpoint_views(f"{prefix}.fc2", self.fc2),
        }


class OPTForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, word = config.hidden_size, config.word_embed_size
        self.embed_tokens = Embedding(config.vocab_size, word)
        self.embed_positions = Embedding(config.max_position_embeddings + _POSITION_OFFSET, hidden)
        projects = word != hidden
        self.project_in = Linear(word, hidden, bias=False) if projects else None
        self.layers = nn.ModuleList(OPTLayer(config, i) for i in range(config.num_layers))
        self.final_norm = (
            LayerNorm(hidden, config.norm_eps, affine=config.norm_affine)
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
        x = x + self.embed_positions(positions + _POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, attend)
        return x if self.final_norm is None else self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        decoder = "model.decoder"
        tensors: dict[str, Tensor] = {}
        for name in (
            "embed_tokens",
            "embed_positions",
            "project_in",
            "project_out",
        ):
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
