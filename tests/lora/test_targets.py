"""Which modules may have an adapter, beyond the layouts of test_adapter.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetero_llm.core.errors import ConfigError
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.configs.transformers import load_transformers_config
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.multimodal import ImageCausalLM
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import make_tiny_checkpoint


def through_transformers(folder: Path) -> CausalLM:
    config = load_transformers_config(folder)
    return load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


def test_layers_of_a_class_that_run_on_some_tokens_are_refused(tiny_folder: Path) -> None:
    """As the experts of a class whose experts are linear layers: only tokens that chose one."""
    model = through_transformers(tiny_folder)
    mlp = model.causal.model.layers[1].mlp
    whole = mlp.forward

    def on_every_second(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, ::2] = whole(x[:, ::2])
        return out

    mlp.forward = on_every_second
    before = {id(m): m.product for m in model.modules() if isinstance(m, Linear)}
    targets = adapter_targets(model, model.config)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert "all tokens" in targets.refused[f"model.layers.1.mlp.{name}"]
        assert f"model.layers.0.mlp.{name}" in targets.targets
    assert "model.layers.1.self_attn.q_proj" in targets.targets
    after = {id(m): m.product for m in model.modules() if isinstance(m, Linear)}
    assert before == after


def test_the_head_of_a_class_is_refused(tiny_folder: Path) -> None:
    model = through_transformers(tiny_folder)
    targets = adapter_targets(model, model.config)
    assert "head" in targets.refused["lm_head"]
    assert "embedding" in targets.refused["model.embed_tokens"]
    assert not any("lm_head" in target.linear for target in targets.targets.values())


def test_opts_last_projection_belongs_to_the_head(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "opt", "projections")
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    targets = adapter_targets(model, config)
    assert "model.decoder.project_in" in targets.targets
    assert "head" in targets.refused["model.decoder.project_out"]


def test_models_with_images_take_none() -> None:
    model = ImageCausalLM.__new__(ImageCausalLM)
    with pytest.raises(ConfigError, match="lora_merge='/a': a model with images takes no adapters"):
        adapter_targets(model, None, field="lora_merge", value="/a")  # type: ignore[arg-type]
