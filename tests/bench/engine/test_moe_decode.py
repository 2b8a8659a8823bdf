"""The bench of mixtures of experts counts what a step reads, on a model for any machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.engine import moe_decode
from bench.engine.moe_decode import bytes_per_step
from bench.shapes import MOE_SHAPES
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class

# Parameters that the model cards state: 46.7, 14.3, 30.5 and 106 billion.
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "glm-4.5-air": 106_852_251_264,
}


def config_of(shape: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(MOE_SHAPES[shape]))
    return load_model_config(folder)


@pytest.mark.parametrize("shape", list(PUBLISHED))
def test_shapes_have_the_published_sizes(shape: str, tmp_path: Path) -> None:
    config = config_of(shape, tmp_path)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[shape]


def test_bytes(tmp_path: Path) -> None:
    read = bytes_per_step(config_of("mixtral-8x7b", tmp_path), 2.0, 4, 100.0)
    assert read["experts"] == 32 * 2 * 3 * 14336 * 4096 * 2
    assert read["matrices"] == (32 * (6144 + 4096 + 8) + 32000) * 4096 * 2
    assert read["kv"] == 32 * 2 * 8 * 128 * 2 * 4 * 100


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss-20b has 20.91 billion parameters, by its model card."""
    config = config_of("gpt-oss-20b", tmp_path)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert sum(p.numel() for p in model.parameters()) == 20_914_757_184
    read = bytes_per_step(config, 4.0, 1, 100.0)
    assert read["experts"] == 24 * 4 * 3 * 2880 * 2880 * 4.5 / 8


def test_the_bench_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "moe.json"
    words = f"moe --shape tiny --device cpu --batches 1,3 --steps 4 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    moe_decode.main()
    first, second = json.loads(out.read_text())["rows"]
    assert (first["batch"], second["batch"]) == (1, 3)
    assert first["experts_touched"] == 2 < second["experts_touched"] <= 6
    assert first["ms_per_step"] > 0 and first["share_of_limit"] == "-"
    assert "written" in capsys.readouterr().out
