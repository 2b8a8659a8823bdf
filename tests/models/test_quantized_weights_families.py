"""Families and formats: each family in each format that can hold it has, tensor for tensor, the
weights that its matrices stand for, and samples the tokens of the plain model with these. Formats'
own packing is tested in tests/quantization/formats, gpt-oss in test_gpt_oss, GGUF files in
tests/scenarios/test_gguf."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_llm.models.experts import Experts, Router, expert_weight
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.matrix import dequantize
from tests.models.quantized_checkpoints import FORMS, Form, quantize
from tests.models.test_loader_online import FAMILIES as DENSE
from tests.models.test_loader_online import MIXTURES, chooses, greedy
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("", DENSE["llama"]),
    "mistral": ("", DENSE["mistral"]),
    "qwen2": ("", DENSE["qwen2"]),
    "qwen3": ("tied_biases", DENSE["qwen3"]),
    "gemma": ("", DENSE["gemma"]),
    "phi3": ("", DENSE["phi3"]),
    "glm4": ("", DENSE["glm"]),
    "mixtral": ("", MIXTURES["mixtral"]),
    "qwen3_moe": ("", {**MIXTURES["qwen3_moe"], "mlp_only_layers": []}),
    "glm4_moe": ("", MIXTURES["glm4_moe"]),
}
IN_ALL = (
    *("fp8 blocks", "float channel", "int8 channel", "pack int4"),
    *("gptq", "gptq asymmetric", "gptq v2", "gptq ordered", "awq"),
    *("nvfp4", "modelopt nvfp4", "mxfp4", "nf4"),
)
"""Formats that all families are tested in; the others are their variants, and meet three."""
TOKENS = 32


def number_of(family: str, form: str) -> int:
    """By which pairs are chosen: steps by one from a family to the next, and from a format."""
    return list(FAMILIES).index(family) + list(FORMS).index(form)


PAIRS = [
    (family, form)
    for family in FAMILIES
    for form in FORMS
    if form in IN_ALL or number_of(family, form) % 3 == 0
]


def with_tokens(family: str, form: str) -> bool:
    """Whether a pair is one of those that sample, too: each family does, and each format."""
    return number_of(family, form) % (6 if form in IN_ALL else 9) == 0


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the plain checkpoint of a family, once."""

    @cache
    def make(family: str) -> tuple[Path, dict[str, Tensor]]:
        variant, changes = FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        make_tiny_checkpoint(folder, family, variant, changes=changes, layers=2)
        return folder, load_file(folder / "model.safetensors")

    return make


def test_each_family_and_each_format_samples() -> None:
    sampled = [pair for pair in PAIRS if with_tokens(*pair)]
    assert {family for family, _ in sampled} == set(FAMILIES)
    assert {form for _, form in sampled} == set(FORMS)


def load(folder: Path) -> CausalLM:
    config = load_model_config(folder)
    return load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


def weights(model: CausalLM) -> dict[str, Tensor]:
    """All weights, and what quantized ones stand for."""
    found = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.quantized is not None:
            found[f"{name}.weight"] = dequantize(module.quantized, torch.float32)
        if isinstance(module, Experts):
            for key in module.quantized:
                stored = getattr(module, key)
                count = stored.shape[0]
                each = [expert_weight(stored, place, torch.float32) for place in range(count)]
                found[f"{name}.{key}"] = torch.stack(each)
    return found


@pytest.mark.parametrize(("family", "form"), PAIRS)
def test_weights_and_tokens(family: str, form: str, originals: Any) -> None:
    folder, tensors = originals(family)
    config, stored, dense = quantize(FORMS[form], tensors)
    rewrite_config(folder, quantization_config=config)
    save_file(stored, folder / "model.safetensors")
    model = load(folder)
    rewrite_config(folder, remove=("quantization_config",))
    save_file(dense, folder / "model.safetensors")
    plain = load(folder)
    found, expected = weights(model), weights(plain)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            assert module.quantized.keys() == {"gate_up", "down"}
        elif isinstance(module, Linear):
            left = ("layers.1.attention", "lm_head", "router")
            assert (module.quantized is None) == any(part in name for part in left), name
    if with_tokens(family, form):
        assert chooses(plain, greedy(model, TOKENS))


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 2), ("glm4_moe", 1)])
def test_routers_that_are_quantized_become_plain(family: str, count: int, tmp_path: Path) -> None:
    """AutoRound quantizes them where it is not told otherwise. Kernels of routers take plain
    weights, those of GLM-4.5 in float32 whatever the model's type."""
    _, changes = FAMILIES[family]
    changes = {**changes, "num_experts": 8, "n_routed_experts": 8}
    folder = make_tiny_checkpoint(tmp_path, family, changes=changes, layers=2)
    form = Form(FORMS["auto-round"].config, lambda _: {}, ("g_idx",))
    tensors = load_file(folder / "model.safetensors")
    config, stored, dense = quantize(form, tensors, re.compile("lm_head"))
    rewrite_config(folder, quantization_config=config)
    save_file(stored, folder / "model.safetensors")
    model = load_model(
        folder, load_model_config(folder), dtype=torch.bfloat16, device="cpu", show_progress=False
    )
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert len(routers) == count
    wanted = [dense[name] for name in sorted(dense) if name.endswith(".mlp.gate.weight")]
    for router, weight in zip(routers, wanted, strict=True):
        assert router.gate.quantized is None
        assert router.gate.weight.dtype == (
            torch.float32 if family == "glm4_moe" else torch.bfloat16
        )
        assert torch.equal(router.gate.weight, weight.to(router.gate.weight.dtype))
