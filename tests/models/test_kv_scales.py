"""Scales of an e4m3 KV cache, from checkpoints and from files of `quantization_param_path`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.collectives import OneRank, Rank
from hetero_llm.models.kv_scales import read_scales_file
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

LAYERS, HEADS = 2, 2
ATTENTION = "model.layers.{}.self_attn."
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
QUANTIZED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plain weights and a KV cache scheme, as llm-compressor writes them for a cache alone."""
    folder = make_tiny_checkpoint(tmp_path, "llama", "gqa", layers=LAYERS)
    rewrite_config(folder, quantization_config=QUANTIZED)
    return folder


def add(folder: Path, tensors: dict[str, Any]) -> None:
    file = folder / "model.safetensors"
    values = {name: torch.as_tensor(value) for name, value in tensors.items()}
    save_file(load_file(file) | values, file, metadata={"format": "pt"})


def load(folder: Path) -> CausalLM:
    config = load_model_config(folder)
    assert config.num_kv_heads == HEADS
    return load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_under_every_name(folder: Path, keys: str, values: str) -> None:
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        at = ATTENTION.format(layer)
        tensors |= {at + keys: [0.5 + layer], at + values: 0.25, at + "q_scale": 3.0}
    add(folder, tensors)
    scales = load(folder).kv_scales
    assert scales is not None and scales.dtype == torch.float32
    assert scales[:, 0].tolist() == [[0.5] * HEADS, [1.5] * HEADS]
    assert (scales[:, 1] == 0.25).all() and scales.shape == (LAYERS, 2, HEADS)


def test_a_scale_of_each_head(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """[N, 1, 1] in bfloat16 in the second layer; the first one has none."""
    at = ATTENTION.format(1)
    each = torch.tensor([0.5, 2.0], dtype=torch.bfloat16).view(HEADS, 1, 1)
    add(folder, {at + "k_scale": each, at + "v_scale": 2 * each})
    with caplog.at_level(logging.WARNING):
        scales = load(folder).kv_scales
    assert scales is not None
    assert scales.tolist() == [[[1, 1], [1, 1]], [[0.5, 2], [1, 4]]]
    assert "layers without scales of the KV cache, which are 1 there: [0]" in caplog.text


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_leaves_out_scales_of_layers_that_are_not_served(
    tmp_path: Path, stage: int
) -> None:
    """Those of layers behind the whole model's, not behind the stage's."""
    folder = make_tiny_checkpoint(tmp_path, "glm4_moe", layers=3)
    rewrite_config(folder, quantization_config=QUANTIZED, num_nextn_predict_layers=1)
    for layer in range(4):
        names = (f"{ATTENTION.format(layer)}{part}_scale" for part in "kv")
        add(folder, {name: float(layer + 1) for name in names})
    config = load_model_config(folder)
    model = load_model(
        folder, config, dtype=torch.float32, device="cpu", show_progress=False,
        collectives=OneRank(Rank(0, 1, stage, 2)),
    )  # fmt: skip
    assert model.kv_scales is not None
    assert model.kv_scales[:, 0, 0].tolist() == [[1.0, 2.0], [3.0]][stage]


def test_one_scale_for_keys_and_values(folder: Path) -> None:
    add(folder, {ATTENTION.format(layer) + "kv_scale": 0.125 for layer in range(LAYERS)})
    scales = load(folder).kv_scales
    assert scales is not None and (scales == 0.125).all()


def test_a_checkpoint_without_scales(folder: Path) -> None:
    assert load(folder).kv_scales is None


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"2.self_attn.k_scale": 1.0}, "2.self_attn.k_scale: the model has 2 layers"),
        ({"0.self_attn.k_scale": 1.0}, "0.self_attn.k_scale has no counterpart"),
        ({"0.self_attn.v_scale": 1.0}, "0.self_attn.v_scale has no counterpart"),
        ({"0.self_attn.k_scale": 0.0}, r"k_scale: \[0.0\], where positive finite"),
        ({"0.self_attn.k_scale": float("nan")}, r"\[nan\], where positive finite"),
        ({"0.self_attn.k_scale": [1.0, float("inf")]}, "inf"),
        ({"0.self_attn.k_scale": [1.0] * 3}, r"F32 \[3\], where one number or 2 are needed"),
        ({"0.self_attn.k_scale": 1}, r"I64 \[\], where one number"),
    ],
)
def test_scales_that_cannot_be(folder: Path, tensors: dict[str, Any], reason: str) -> None:
    add(folder, {f"model.layers.{name}": value for name, value in tensors.items()})
    with pytest.raises(ModelLoadError, match=f"model.safetensors: .*{reason}"):
        load(folder)


def test_scales_beside_plain_weights_are_unexpected(folder: Path) -> None:
    """Nothing says that such a tensor is a scale of a KV cache."""
    rewrite_config(folder, quantization_config=None)
    add(folder, {ATTENTION.format(0) + "k_scale": 1.0})
    with pytest.raises(ModelLoadError, match="unexpected: .*k_scale"):
        load(folder)


# -- quantization_param_path ------------------------------------------------------------------


def content() -> dict[str, Any]:
    factors = {"0": {"0": 0.5, "1": 2}}
    return {
        "model_type": "llama",
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors},
    }


def write(folder: Path, value: object) -> str:
    path = folder / "kv_scales.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_a_file_of_scales(folder: Path) -> None:
    config = load_model_config(folder)
    scales = read_scales_file(write(folder, content()), config)
    assert scales.tolist() == [[[0.5] * HEADS] * 2, [[2] * HEADS] * 2]
    assert scales.is_contiguous() and scales.dtype == torch.float32
    anonymous = content() | {"model_type": None}
    assert torch.equal(read_scales_file(write(folder, anonymous), config), scales)


def _in_cache(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["kv_cache"].update({key: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(model_type="opt"), "model_type='opt': the model is of type 'llama'"),
        (lambda c: c.pop("kv_cache"), "kv_cache=None: an object is needed"),
        (_in_cache("dtype", "float8_e5m2"), "kv_cache.dtype='float8_e5m2': must be"),
        (_in_cache("scaling_factor", [1.0]), r"kv_cache.scaling_factor=\[1.0\]: .* rank 0"),
        (_in_cache("scaling_factor", {"0": {}, "1": {}}), "scaling_factor=.*: .* one GPU"),
        (
            _in_cache("scaling_factor", {"0": {"0": 1.0}}),
            "factor.0=.*: a scale of each layer .* 1 ",
        ),
        (_in_cache("scaling_factor", {"0": {"0": 1.0, "1": 0}}), "factor.0.1=0: a positive"),
        (_in_cache("scaling_factor", {"0": {"0": 1.0, "1": "1"}}), "factor.0.1='1': a positive"),
        (_in_cache("scaling_factor", {"0": {"0": True, "1": 1}}), "factor.0.0=True: a positive"),
        (_in_cache("scaling_factor", {"0": {"0": 10**400, "1": 1}}), "factor.0.0=.*: a pos"),
        (_in_cache("scaling_factor", {"0": {"0": float("nan"), "1": 1}}), "factor.0.0=nan: a pos"),
    ],
)
def test_files_that_cannot_be(
    folder: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    value = content()
    change(value)
    path = write(folder, value)
    with pytest.raises(ConfigError, match=f"^quantization_param_path='.*.json': .*{reason}"):
        read_scales_file(path, load_model_config(folder))


def test_files_that_cannot_be_read(folder: Path) -> None:
    config = load_model_config(folder)
    with pytest.raises(ConfigError, match="^quantization_param_path='/no/file': no such file"):
        read_scales_file("/no/file", config)
    path = folder / "half.json"
    path.write_text('{"kv_cache": ')
    with pytest.raises(ConfigError, match="half.json': not valid JSON"):
        read_scales_file(str(path), config)
