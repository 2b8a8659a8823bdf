"""Whole checkpoints of ten families as the tools write them, through the loader: names, biases,
fused and tied weights, routers and lists of plain modules are the tools' own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config

from hetero_llm.models.layers import CausalLM, Linear
from tests.models.test_quantized_weights_families import FAMILIES, load, weights
from tests.models.tiny import make_tiny_checkpoint, rewrite_config
from tests.quant_tools.test_compressed_tensors import set_scales

MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe")
DENSE = [family for family in FAMILIES if family not in MIXTURES]
WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def make(folder: Path, family: str, **changes: Any) -> Path:
    variant, own = FAMILIES[family]
    return make_tiny_checkpoint(folder, family, variant, changes={**own, **changes}, layers=2)


def assert_near(model: CausalLM, plain: CausalLM, largest: float) -> None:
    """All weights differ by the rounding alone."""
    found, expected = weights(model), weights(plain)
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name] - one).norm() / one.norm()) for name, one in expected.items()
    }
    assert max(errors.values()) < largest, errors


def num_quantized(model: CausalLM) -> int:
    linears = (one for one in model.modules() if isinstance(one, Linear))
    return sum(one.quantized is not None for one in linears)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "largest"), [(4, 0.12), (8, 0.02)])
def test_bitsandbytes(family: str, bits: int, largest: float, tmp_path: Path) -> None:
    """transformers leaves experts plain, which it holds as one tensor."""
    plain = make(tmp_path / "plain", family)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = BitsAndBytesConfig(**(options if bits == 4 else {"load_in_8bit": True}))
    written = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    written.save_pretrained(tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    # The two products of each attention, and of each MLP that is no mixture.
    assert num_quantized(model) >= 4
    assert_near(model, load(plain), largest)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(("scheme", "largest"), [("W4A16_ASYM", 0.13), ("FP8_DYNAMIC", 0.04)])
def test_compressed_tensors(family: str, scheme: str, largest: float, tmp_path: Path) -> None:
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    plain = make(tmp_path / "plain", family, hidden_size=128, head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    config = quantization.QuantizationConfig(
        config_groups={scheme: ["Linear"]}, quantization_status="compressed", ignore=["lm_head"]
    )
    quantization.apply_quantization_config(model, config)
    said = json.loads(json.dumps(config.to_dict(), default=str))
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        if getattr(layer, "quantization_scheme", None) is not None:
            set_scales(layer, quantization)
            compressors.compress_module(layer)
            said["format"] = layer.quantization_scheme.format.value
    folder = tmp_path / "quantized"
    model.config.save_pretrained(folder)
    stored = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, quantization_config={**said, "quant_method": "compressed-tensors"})
    found = load(folder)
    assert num_quantized(found) == 8
    assert_near(found, load(plain), largest)


@pytest.mark.parametrize(
    ("family", "changes", "quantized"),
    [
        ("llama", WIDE, 8),
        ("gemma", WIDE, 8),
        ("glm4", WIDE, 8),
        # Blocks do not divide the attention's: plain, with scales beside them.
        ("qwen3", {**WIDE, "hidden_size": 128, "head_dim": 16}, 4),
    ],
)
def test_transformers_fp8(
    family: str,
    changes: dict[str, Any],
    quantized: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantizers: Any = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    # It asks for a GPU, which writing does not need.
    monkeypatch.setattr(
        quantizers.FineGrainedFP8HfQuantizer, "validate_environment", lambda self, **_: None
    )
    plain = make(tmp_path / "plain", family, **changes)
    written = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=FineGrainedFP8Config(), device_map="cpu", dtype=torch.float32
    )
    written.save_pretrained(tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    assert num_quantized(model) == quantized
    assert_near(model, load(plain), 0.04)
