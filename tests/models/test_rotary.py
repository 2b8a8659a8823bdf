"""Rotary tables of real models' sizes against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.rotary import RotaryEmbedding, apply_rotary

LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + i / 64 for i in range(64)],
    "long_factor": [1.0 + i / 4 for i in range(64)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn_ratio": {**YARN, "factor": None},
    "yarn_betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "longrope": LONGROPE,
    "longrope_factor": {**LONGROPE, "factor": 8.0},
    "longrope_attention_factor": {**LONGROPE, "attention_factor": 1.25},
}


def raw_config(scaling: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 512,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_equals_transformers(tmp_path: Path, scaling: dict[str, Any], theta: float) -> None:
    raw = raw_config(scaling, theta)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert config.rope is not None
    ours = RotaryEmbedding(config.rope, config.max_model_len)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(raw)))
    positions = torch.tensor([0, 1, 7, 1023, config.max_model_len - 1])
    q, k = torch.randn(2, len(positions), 3, config.head_dim).unbind()
    their_factors = theirs(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], *their_factors, unsqueeze_dim=2)
    factors = ours.factors(positions, torch.float32)
    for x, reference in zip((q, k), expected, strict=True):
        torch.testing.assert_close(apply_rotary(x, *factors), reference[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("limit", [1024, 1025, 2048])
def test_longrope_takes_the_long_factors_for_long_contexts(tmp_path: Path, limit: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(LONGROPE)))
    config = load_model_config(tmp_path)
    assert config.rope is not None and config.max_model_len == 2048
    table = RotaryEmbedding(config.rope, limit).table
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(raw_config(LONGROPE)))
    positions = torch.arange(limit)[None]  # theirs go by the last position
    cos, sin = (factor[0, :, :64] for factor in theirs(torch.ones(1), positions))
    torch.testing.assert_close(table, torch.cat((cos, sin), dim=-1), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("limit", "scale"), [(1024, 1.1), (2048, 1.3)])
def test_longrope_with_a_scale_for_each_length(tmp_path: Path, limit: int, scale: float) -> None:
    scaling = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
    (tmp_path / "config.json").write_text(json.dumps(raw_config(scaling)))
    config = load_model_config(tmp_path)
    assert config.rope is not None
    table = RotaryEmbedding(config.rope, limit).table
    torch.testing.assert_close(table[0, :64], torch.full((64,), scale))


def test_long_positions_keep_fp32_under_a_low_default_dtype(tmp_path: Path) -> None:
    from tests.models.tiny import make_tiny_checkpoint

    config = load_model_config(make_tiny_checkpoint(tmp_path, "llama"))
    assert config.rope is not None
    expected = RotaryEmbedding(config.rope, 4096).table
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(RotaryEmbedding(config.rope, 4096).table, expected)
    finally:
        torch.set_default_dtype(torch.float32)
