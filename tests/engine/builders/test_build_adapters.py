"""What adapters of an engine are refused when they are prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_llm.config.lora_config import LoraConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.builders.build_adapters import LoadedAdapters, prepare_adapters
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.hybrid import open_hybrid
from tests.models.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")


def prepared(folder: Path, backend: str = "cuda", **options: object) -> LoadedAdapters | None:
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    lora = LoraConfig(enabled=True, **options)  # type: ignore[arg-type]
    return prepare_adapters(lora, model, config, torch.float32, backend=backend)


def test_ranks_that_no_kernel_has(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_lora_rank=512: .* up to 256"):
        prepared(tiny_folder, max_rank=512)
    assert prepared(tiny_folder, "torch", max_rank=512) is not None


def test_slots_have_room_for_experts_if_asked(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    without, with_them = (prepared(folder, experts=experts) for experts in (False, True))
    assert without is not None and with_them is not None
    assert without.layout is not None and with_them.layout is not None
    assert without.layout.num_bytes < with_them.layout.num_bytes
    more = set(with_them.layout.places) - set(without.layout.places)
    assert more == {f"layers.{i}.mlp.experts.{w}" for i in range(2) for w in ("gate_up", "down")}


def test_experts_on_the_host_take_none(tmp_path: Path) -> None:
    changes = {"head_dim": 16}
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe", "full", layers=1, changes=changes)
    lora = LoraConfig(enabled=True, experts=True)
    with open_hybrid(folder, CPU, residency=0.5, most_rows=8) as hybrid:
        config = load_model_config(folder)
        with pytest.raises(ConfigError, match="lora_experts=True: .* on the host"):
            prepare_adapters(lora, hybrid.model, config, torch.float32, backend="cuda")
