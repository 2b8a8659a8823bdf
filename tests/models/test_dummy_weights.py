"""Random weights: their size, and what they depend on."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.helpers.rank_models import load_rank
from tests.models.loading import load, same_parameters
from tests.models.tiny import make_tiny_checkpoint


def test_seed_name_and_row_decide(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    first, second = (load(folder, load_format="dummy", seed=seed) for seed in (0, 1))
    assert same_parameters(first, load(folder, load_format="dummy", seed=0))
    assert not same_parameters(first, second)
    rows = torch.cat(
        [p for p in first.parameters() if p.dim() == 2 and p.shape[1] == first.config.hidden_size]
    )
    assert len(rows.unique(dim=0)) == len(rows)


def test_numbers_are_of_a_trained_models_size(tmp_path: Path) -> None:
    model = load_rank(make_tiny_checkpoint(tmp_path, "qwen2"), load_format="dummy")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif parameter.numel() > 1000:
            assert 0.018 < float(parameter.std()) < 0.022, name
            assert float(parameter.abs().max()) < 0.035 and abs(float(parameter.mean())) < 0.003
