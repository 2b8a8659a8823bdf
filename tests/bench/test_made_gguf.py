"""GGUF files of random weights: they load, and routers choose experts as often as they ought to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.made_gguf import expert_bytes, write_gguf, write_routers
from bench.shapes import MOE_SHAPES, Prompts
from hetero_llm.models.experts import Router
from hetero_llm.models.loader import expert_sizes
from hetero_llm.models.read_config import load_model_config
from tests.models.loading import load
from tests.models.tiny import DenseAttend

# Wide enough for the parts of a hidden state to be apart.
CONFIG = {
    **MOE_SHAPES["tiny-qwen3-moe"], "num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 512,
    "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
TOKENS = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.gguf"
    write_gguf(path, CONFIG)
    return path


def test_sizes(path: Path) -> None:
    found = expert_sizes(path, load_model_config(path), dtype=torch.bfloat16)
    assert (found.num_layers, found.num_experts) == (2, 64)
    assert found.expert_bytes == expert_bytes(CONFIG) == 3 * 128 * 512 * 18 // 32


@pytest.mark.parametrize(("popularity", "least", "most"), [("uniform", 1, 3), ("zipf", 5, 12)])
def test_popularities(path: Path, popularity: str, least: float, most: float) -> None:
    """How much more often than on average the most popular expert is chosen: of 8 draws without
    replacement from 64 by 1 / rank, 8 times at most."""
    write_routers(path, CONFIG, popularity)
    model = load(path)
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, routed: chosen.append(routed[0]))
    ids = torch.tensor(Prompts(CONFIG["vocab_size"]).one(TOKENS))
    with torch.inference_mode():
        model(ids, torch.arange(TOKENS), DenseAttend(model.config, [TOKENS]))
    assert len(chosen) == 2
    for routed in chosen:
        counts = torch.bincount(routed.flatten().long(), minlength=64)
        assert least <= counts.max() / counts.float().mean() <= most
