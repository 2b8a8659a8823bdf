"""Whole checkpoints that transformers writes with bitsandbytes, through the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.matrix import QuantizedWeight, dequantize


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        (
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            },
            "nf4",
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp8"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_bitsandbytes(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=BitsAndBytesConfig(**options),
        device_map="cpu",
        dtype=torch.float32,
    )
    folder = tmp_path / "quantized"
    quantized.save_pretrained(folder)
    model = load_model(
        folder, load_model_config(folder), dtype=torch.float32, device="cpu", show_progress=False
    )
    found = [one for one in model.modules() if isinstance(one, QuantizedWeight)]
    assert len(found) == 2 * 4 and {one.matrix.kind for one in found} == {kind}
    # The plain weights differ from what the codes stand for by the rounding alone.
    plain = load_model(
        tmp_path / "plain",
        load_model_config(tmp_path / "plain"),
        dtype=torch.float32,
        device="cpu",
        show_progress=False,
    )
    weights = [one.weight for one in plain.modules() if getattr(one, "quantized", 0) is None]
    largest = {"nf4": 0.12, "fp8": 0.16, "int8": 0.02}[kind]
    names = {tuple(one.matrix.shape) for one in found}
    matrices = [weight for weight in weights if tuple(weight.shape) in names]
    assert len(matrices) == len(found)
    for weight, one in zip(matrices, found, strict=True):
        error = (dequantize(one.matrix, torch.float32) - weight).norm() / weight.norm()
        assert error < largest
