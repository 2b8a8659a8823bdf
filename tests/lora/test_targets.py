"""Which modules may have an adapter, beyond the layouts of test_adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from hetero_llm.core.errors import ConfigError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.lora.adapter import read_adapter
from hetero_llm.lora.merge import merge_adapter
from hetero_llm.lora.products import AdaptedProducts
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.configs.transformers import load_transformers_config
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.multimodal import ImageCausalLM
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.sharding import rank_parts
from tests.helpers.adapters import write_adapter, write_expert_adapter
from tests.helpers.rank_models import Ranks, check_same_tokens, greedy, load_rank
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


LAYOUTS_OF_RANKS = [
    ("llama", "gqa"), ("llama", "mqa"), ("phi3", "partial_window_tied"), ("gpt2", "tied"),
    ("falcon", "grouped"), ("gpt_bigcode", "multi_query"), ("glm", "half_rotated"),
    ("gptj", "partial"), ("opt", "projections"), ("mixtral", "full"),
]  # fmt: skip


def written(folder: Path, checkpoint: Path) -> Path:
    """A random adapter of attention and MLP outside of experts."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return write_adapter(
        folder, reference, modules=r"(?!.*(project|gate\b|expert|router)).*"
    ).folder


@pytest.mark.parametrize(("family", "variant"), LAYOUTS_OF_RANKS)
def test_ranks_have_their_parts_of_an_adapter(tmp_path: Path, family: str, variant: str) -> None:
    folder = make_tiny_checkpoint(tmp_path / "base", family, variant)
    request = LoRARequest("a", 1, str(written(tmp_path / "adapter", folder)))
    whole, ranks = load_rank(folder), Ranks(folder, 4)

    def deltas(model: CausalLM) -> tuple[str, dict[str, Tensor]]:
        targets = adapter_targets(model, whole.config)
        adapter = read_adapter(request, targets, max_rank=64, dtype=torch.float32)
        rows = {name: size[0] for name, size in targets.sizes.items()}
        linears = adapter.linears.items()
        return adapter.ref.content_hash, {n: linear.delta(rows[n]) for n, linear in linears}

    key, expected = deltas(whole)
    assert expected
    for model in ranks.models:
        assert isinstance(model, DecoderLM)
        cuts = rank_parts(model, whole.config).cuts
        own_key, own = deltas(model)
        assert own_key == key and own.keys() == expected.keys()
        for name, delta in own.items():
            cut = cuts.get(f"{name}.weight")
            part = expected[name]
            part = part if cut is None else part.index_select(cut.dim, cut.index())
            torch.testing.assert_close(delta, part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_ranks_have_their_parts_of_an_adapter_of_experts(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path / "base", family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_expert_adapter(tmp_path / "a", theirs, modules=None)
    request = LoRARequest("a", 1, str(tmp_path / "a"))
    whole, ranks = load_rank(folder), Ranks(folder, 2)

    def deltas(model: CausalLM) -> tuple[str, dict[str, Tensor]]:
        targets = adapter_targets(model, whole.config)
        adapter = read_adapter(request, targets, max_rank=64, dtype=torch.float32)
        found = {
            name: torch.stack([one.delta(targets.sizes[name][0]) for one in experts.values()])
            for name, experts in adapter.experts.items()
        }
        return adapter.ref.content_hash, found

    key, expected = deltas(whole)
    assert expected
    for model in ranks.models:
        assert isinstance(model, DecoderLM)
        cuts = rank_parts(model, whole.config).cuts
        own_key, own = deltas(model)
        assert own_key == key and own.keys() == expected.keys()
        for name, delta in own.items():
            cut = cuts[name]
            part = expected[name].index_select(cut.dim, cut.index())
            torch.testing.assert_close(delta, part, rtol=1e-5, atol=1e-6)


def test_tokens_of_ranks_with_an_adapter(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "base", "qwen2", "full")
    request = LoRARequest("a", 1, str(written(tmp_path / "adapter", folder)))
    whole, ranks = load_rank(folder), Ranks(folder, 2)
    plain = greedy(load_rank(folder), 16)[1]

    def adapted(model: CausalLM) -> Callable[[int], None]:
        targets = adapter_targets(model, whole.config)
        adapter = read_adapter(request, targets, max_rank=64, dtype=torch.float32)
        products = AdaptedProducts(model, targets.linears(), 1, F.linear)
        products.fill(0, adapter)
        cpu = torch.device("cpu")
        return lambda count: products.begin_step(np.zeros(count, np.int64), cpu)

    begins = {id(model): adapted(model) for model in (whole, *ranks.models)}
    for model in (whole, *ranks.models):
        model.register_forward_pre_hook(lambda module, args: begins[id(module)](len(args[0])))
    assert greedy(whole, 16)[1] != plain
    check_same_tokens(whole, ranks)


def test_tokens_of_ranks_with_a_merged_adapter(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "base", "llama", "gqa")
    adapter = str(written(tmp_path / "adapter", folder))
    whole, ranks = load_rank(folder), Ranks(folder, 2)
    config = whole.config
    for model in (whole, *ranks.models):
        merge_adapter(model, config, adapter)
    check_same_tokens(whole, ranks)
