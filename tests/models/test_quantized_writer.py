"""Quantized copies of checkpoints: what is written is what quantizing while loading makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.quantization.compressed import WRITTEN
from hetero_llm.quantization.matrix import dequantize
from hetero_llm.quantization.names import OnlineName
from tests.models.test_loader_online import FAMILIES, WIDE, greedy, linears, load
from tests.models.tiny import make_tiny_checkpoint


@pytest.mark.parametrize("name", WRITTEN)
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


def test_mistakes(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=WIDE, layers=1)
    with pytest.raises(ConfigError, match="format='ifq_nf4': no format of compressed-tensors"):
        write_quantized(folder, tmp_path / "out", "ifq_nf4", device="cpu")
    with pytest.raises(ConfigError, match="out=.*it exists"):
        write_quantized(folder, folder, "fp8", device="cpu")
    write_quantized(folder, tmp_path / "out", "fp8", device="cpu")
    with pytest.raises(ConfigError, match="quantized already"):
        write_quantized(tmp_path / "out", tmp_path / "twice", "int4", device="cpu")
    transposed = make_tiny_checkpoint(tmp_path / "gpt2", "gpt2", layers=1)
    with pytest.raises(ModelLoadError, match="stored transposed"):
        write_quantized(transposed, tmp_path / "other", "fp8", device="cpu")
