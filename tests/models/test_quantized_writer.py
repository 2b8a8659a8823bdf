"""Quantized copies of checkpoints: what is written is what quantizing while loading makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.quantization.matrix import dequantize
from hetero_llm.quantization.names import ONLINE_NAMES, OnlineName
from tests.models.test_loader_online import (
    FAMILIES,
    MIXTURES,
    WIDE,
    greedy,
    linears,
    load,
    mixtures,
)
from tests.models.tiny import make_tiny_checkpoint


@pytest.mark.parametrize("name", ("fp8", "fp8_block", "ifq", "int4"))
def test_experts(tmp_path: Path, name: OnlineName) -> None:
    """Each by its name; int4 without zero points, which vLLM's experts do not have."""
    folder = make_tiny_checkpoint(
        tmp_path / "plain", "qwen2_moe", changes=MIXTURES["qwen2_moe"], layers=2
    )
    out = tmp_path / "quantized"
    write_quantized(folder, out, name, device="cpu")
    stored = load_file(out / "model.safetensors")
    expert = "model.layers.0.mlp.experts.5.down_proj"
    suffixes = {key.removeprefix(f"{expert}.") for key in stored if key.startswith(f"{expert}.")}
    packed = {"weight_packed", "weight_scale", "weight_shape"}
    assert suffixes == (packed if name in ("ifq", "int4") else {"weight", "weight_scale"})
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    plain = {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"}
    assert set(config["ignore"]) == plain
    assert config["config_groups"]["group_0"]["weights"]["symmetric"]
    found, expected = load(out, None), load(folder, name)
    (ours,), (others,) = mixtures(found).values(), mixtures(expected).values()
    for weight, matrix in ours.quantized.items():
        wanted = dequantize(others.quantized[weight].matrix, torch.float32)
        values = dequantize(matrix.matrix, torch.float32)
        error = (values - wanted).norm() / wanted.norm()
        assert error < 0.2 if name == "int4" else error == 0
    if name != "int4":
        assert greedy(found, 8) == greedy(expected, 8)


def test_layers_that_are_not_served_are_copied(tmp_path: Path) -> None:
    """With a router in float32 beside quantized experts."""
    changes = MIXTURES["glm4_moe"]
    folder = make_tiny_checkpoint(tmp_path / "plain", "glm4_moe", changes=changes, layers=2)
    further = {"model.layers.2.eh_proj.weight": torch.rand(64, 128)}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    out = tmp_path / "quantized"
    write_quantized(folder, out, "fp8_block", device="cpu")
    stored, original = load_file(out / "model.safetensors"), load_file(file)
    for name in (*further, "model.layers.1.mlp.gate.e_score_correction_bias"):
        assert torch.equal(stored[name], original[name])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {
        "lm_head", "model.layers.1.mlp.gate", "model.layers.2.eh_proj",
    }  # fmt: skip
    assert greedy(load(out, None), 8) == greedy(load(folder, "fp8_block"), 8)


@pytest.mark.parametrize("name", ONLINE_NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_what_is_written_is_read_again(tmp_path: Path, name: OnlineName, family: str) -> None:
    changes = {**FAMILIES[family], "intermediate_size": 192}
    folder = make_tiny_checkpoint(
        tmp_path / "plain", family, changes=changes, with_tokenizer=True, layers=2
    )
    out = tmp_path / "quantized"
    write_quantized(folder, out, name, device="cpu", shard_bytes=50_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    found, expected = load(out, None), load(folder, name)
    for key, linear in linears(expected).items():
        other = linears(found)[key].quantized
        if linear.quantized is None:
            assert other is None
            continue
        assert other is not None and other.kind == linear.quantized.kind
        wanted = dequantize(linear.quantized, torch.float32)
        assert torch.equal(dequantize(other, torch.float32), wanted)
    assert greedy(found, 8) == greedy(expected, 8)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    if name == "ifq_nf4":
        assert config["quant_method"] == "bitsandbytes"
        assert "lm_head" in config["llm_int8_skip_modules"]
    else:
        assert config["quant_method"] == "compressed-tensors" and "lm_head" in config["ignore"]


def test_one_group_serves_all_matrices(tmp_path: Path) -> None:
    """Columns that 128 divides and columns that only 32 divides: groups of 32."""
    changes = {**WIDE, "hidden_size": 128, "intermediate_size": 96}
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=changes, layers=1)
    write_quantized(folder, tmp_path / "out", "int4", device="cpu")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (128, 3)
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (96, 4)
    for linear in linears(load(tmp_path / "out", None)).values():
        assert linear.quantized is None or linear.quantized.group == 32


def test_columns_that_no_group_of_int4_divides(tmp_path: Path) -> None:
    """Other formats do not ask for groups."""
    changes = {**WIDE, "intermediate_size": 40}
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=changes, layers=1)
    write_quantized(folder, tmp_path / "out", "fp8", device="cpu")
    assert greedy(load(tmp_path / "out", None), 4) == greedy(load(folder, "fp8"), 4)
    with pytest.raises(ModelLoadError, match="40 columns"):
        write_quantized(folder, tmp_path / "other", "int4", device="cpu")


def test_mistakes(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=WIDE, layers=1)
    with pytest.raises(ConfigError, match="out=.*it exists"):
        write_quantized(folder, folder, "fp8", device="cpu")
    write_quantized(folder, tmp_path / "out", "fp8", device="cpu")
    with pytest.raises(ConfigError, match="quantized already"):
        write_quantized(tmp_path / "out", tmp_path / "twice", "int4", device="cpu")
    transposed = make_tiny_checkpoint(tmp_path / "gpt2", "gpt2", layers=1)
    with pytest.raises(ModelLoadError, match="stored transposed"):
        write_quantized(transposed, tmp_path / "other", "fp8", device="cpu")
    banks = make_tiny_checkpoint(tmp_path / "banks", "gpt_oss", layers=1)
    with pytest.raises(ModelLoadError, match="gate_up_proj holds the matrices of all experts"):
        write_quantized(banks, tmp_path / "other", "fp8", device="cpu")
