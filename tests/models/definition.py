"""A Llama-like model computed from the definitions, in double precision and without our code: the
reference of what no class of transformers computes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def by_definition(
    model: Any,
    ids: Tensor,
    *,
    frequencies: Tensor | None = None,
    slopes: list[float] | None = None,
    query_scales: list[float] | None = None,
) -> Tensor:
    """[T, vocab] log-probabilities of a Llama-like model of 4 heads of 8.

    Args:
        model: Of transformers, for its weights.
        ids: [T].
        frequencies: [4] of the rotary embedding; None: nothing is rotated.
        slopes: Of ALiBi, per head.
        query_scales: [T] factors of the queries.
    """
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}
    count = len(ids)
    places = torch.arange(count, dtype=torch.float64)

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps
        return x / mean.sqrt() * w[name]

    def heads(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        return F.linear(x, w[f"{name}.weight"], bias).view(count, 4, 8).transpose(0, 1)

    def turned(x: Tensor) -> Tensor:
        if frequencies is None:
            return x
        pairs = torch.complex(x[..., :4], x[..., 4:])
        pairs = pairs * torch.polar(torch.ones(1).double(), torch.outer(places, frequencies))
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{i}"
        y = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (heads(y, f"{prefix}.self_attn.{letter}_proj") for letter in "qkv")
        q, k = turned(q), turned(k)
        if query_scales is not None:
            q = q * torch.tensor(query_scales).double()[:, None]
        scores = q @ k.transpose(1, 2) / math.sqrt(8)
        if slopes is not None:
            distance = places[:, None] - places
            scores = scores - torch.tensor(slopes).double()[:, None, None] * distance
        hidden = torch.ones(count, count).triu(1).bool()
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + attended.transpose(0, 1).flatten(1) @ w[f"{prefix}.self_attn.o_proj.weight"].T
        y = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (y @ w[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T
    logits = norm(x, "model.norm.weight") @ w["lm_head.weight"].T
    return logits.log_softmax(-1).float()


def plain_frequencies(theta: float = 10000.0) -> Tensor:
    return torch.tensor([theta ** (-i / 4) for i in range(4)], dtype=torch.float64)
