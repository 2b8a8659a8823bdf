"""Experts of transformers classes: ours in their place where they compute the same, else theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hetero_llm.models.transformers_modules import Conversion, FlatExperts

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_experts_per_tok": 2}
QWEN = Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=24, hidden_act="gelu")


class Limited(Qwen3MoeExperts):
    """Limits what comes out, far from what small rows reach."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights).clamp(-100, 100)


class Unweighted(Qwen3MoeExperts):
    """Leaves the routing weights out."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, torch.ones_like(top_k_weights))


def gpt_oss() -> nn.Module:
    """Biases, transposed weights, gates and ups in turns, a limit."""
    return GptOssExperts(GptOssConfig(**SIZES, num_local_experts=5, intermediate_size=24))


def converted(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.experts = module
    Conversion(8, None).convert(holder)
    return holder.get_submodule("experts")


def qwen(kind: type[Qwen3MoeExperts] = Qwen3MoeExperts) -> Any:
    made: Any = kind(QWEN)
    made.config._experts_implementation = "eager"
    return made


def test_equal_to_the_loop_of_the_class_with_rows_that_visit_no_expert() -> None:
    theirs = qwen()
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in theirs.named_parameters()}
    theirs.load_state_dict(weights)
    ours = converted(qwen())
    assert isinstance(ours, FlatExperts)
    ours.load_state_dict(weights)
    x = torch.randn(6, 16, generator=generator)
    ids = torch.tensor([[0, 1], [4, 2], [3, 5], [5, 0], [1, 4], [2, 3]])  # 5: none
    shares = torch.rand(ids.shape, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, ids, shares), theirs(x, ids, shares))


@pytest.mark.parametrize("make", [lambda: qwen(Limited), lambda: qwen(Unweighted), gpt_oss])
def test_experts_of_another_kind_stay(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert converted(module) is module
