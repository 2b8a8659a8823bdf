"""The stages of a model on the CPU, one behind the other in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_llm.models.collectives import OneRank, Rank
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from tests.helpers.rank_models import WholeAttend, load_rank


class Stages(torch.nn.Module):
    """All stages of one model, called as the whole model is.

    Args:
        options: Of `load_rank`.
    """

    def __init__(self, folder: Path, count: int, **options: Any) -> None:
        super().__init__()
        self.models = [
            load_rank(folder, OneRank(Rank(0, 1, stage, count)), **options)
            for stage in range(count)
        ]
        self.config: ModelConfig = self.models[-1].config

    def forward(self, ids: Tensor, positions: Tensor, attend: object) -> Tensor:
        """Each stage attends with its own layers, which it numbers from 0."""
        x = ids
        for model in self.models:
            x = model(x, positions, WholeAttend(model.config))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.models[-1].logits(hidden)


def held_bytes(model: CausalLM) -> int:
    """Of the parameters, each counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())
