"""Families with layer norms: spellings of their configurations, what is refused, old checkpoints,
and low precision. `test_families.py` compares every variant with transformers in float32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.common import alibi_slopes
from hetero_llm.models.configs.falcon import rounded_to_bfloat16
from hetero_llm.models.configs.layer_norm import LayerNormConfig
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.test_registry import log_probs, random_sequences, reference_log_probs
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "intermediate_size": 100,
}
_GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": _SHAPE,
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 8},
    "FalconForCausalLM": _SHAPE,
    "RWForCausalLM": {"vocab_size": 96, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "BloomForCausalLM": {"vocab_size": 96, "n_embed": 64, "n_layer": 3, "n_head": 4},
    "GPTBigCodeForCausalLM": _GPT,
    "PhiForCausalLM": _SHAPE,
    "StableLmForCausalLM": {**_SHAPE, "num_key_value_heads": 2},
    "StableLMEpochForCausalLM": {**_SHAPE, "num_key_value_heads": 2},
    "NemotronForCausalLM": _SHAPE,
    "Starcoder2ForCausalLM": {**_SHAPE, "num_key_value_heads": 2},
}


def read(folder: Path, architecture: str, **changes: Any) -> LayerNormConfig:
    raw = {"architectures": [architecture], **CONFIGS[architecture], **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_model_config(folder)
    assert isinstance(config, LayerNormConfig)
    return config


def rotary(config: ModelConfig) -> tuple[int, float]:
    assert config.rope is not None
    return config.rope.rotary_dim, config.rope.theta


@pytest.mark.parametrize("architecture", CONFIGS)
def test_defaults_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    config = read(tmp_path, architecture)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (64, 3, 4)
    assert (config.head_dim, config.attn_scale) == (16, 0.25)
    assert config.norm_eps == 1e-5
    assert config.sliding_windows == (None,) * 3
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    assert (biases, config.tie_word_embeddings, config.hidden_act) == {
        "GPTNeoXForCausalLM": ((True, True, True), False, "gelu"),
        "GPTJForCausalLM": ((False, False, True), False, "gelu_new"),
        "FalconForCausalLM": ((False, False, False), True, "gelu"),
        "RWForCausalLM": ((False, False, False), True, "gelu"),
        "BloomForCausalLM": ((True, True, True), True, "gelu_pytorch_tanh"),
        "GPTBigCodeForCausalLM": ((True, True, True), True, "gelu_pytorch_tanh"),
        "PhiForCausalLM": ((True, True, True), False, "gelu_new"),
        "StableLmForCausalLM": ((False, False, False), False, "silu"),
        "StableLMEpochForCausalLM": ((False, False, False), False, "silu"),
        "NemotronForCausalLM": ((False, False, False), False, "relu2"),
        "Starcoder2ForCausalLM": ((True, True, True), True, "gelu_pytorch_tanh"),
    }[architecture]
    rotated = {"GPTNeoX": 4, "GPTJ": 8, "Phi": 8, "StableLM": 4, "StableLm": 4, "Nemotron": 8}
    share = next((n for name, n in rotated.items() if architecture.startswith(name)), 16)
    if architecture in ("BloomForCausalLM", "GPTBigCodeForCausalLM"):
        assert config.rope is None
    else:
        assert rotary(config) == (share, 10000.0)


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        (
            "GPTNeoXForCausalLM",
            {"rotary_pct": 0.5, "rotary_emb_base": 500},
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500}},
        ),
        ("StableLmForCausalLM", {"rope_pct": 0.5}, {"partial_rotary_factor": 0.5}),
        ("StableLmForCausalLM", {"norm_eps": 1e-3}, {"layer_norm_eps": 1e-3}),
        ("NemotronForCausalLM", {"rope_percent": 0.25}, {"partial_rotary_factor": 0.25}),
        ("NemotronForCausalLM", {"rope_percentage": 1.0}, {"partial_rotary_factor": 1.0}),
        ("BloomForCausalLM", {"seq_length": 64}, {"max_position_embeddings": 64}),
        ("BloomForCausalLM", {"hidden_size": 32, "n_embed": None}, {"n_embed": 32}),
    ],
)
def test_older_spellings(
    tmp_path: Path, architecture: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert read(tmp_path, architecture, **old) == read(tmp_path, architecture, **new)
    assert read(tmp_path, architecture, **old) != read(tmp_path, architecture)


def test_first_falcons(tmp_path: Path) -> None:
    """As the model cards of 40B, 7B and RW-1B had them before transformers knew Falcon."""
    name = "RWForCausalLM"
    large = read(tmp_path, name, n_head_kv=2, parallel_attn=True)
    assert (large.num_kv_heads, large.parallel, large.shared_norm) == (2, True, False)
    small = read(tmp_path, name, multi_query=True, parallel_attn=True)
    assert (small.num_kv_heads, small.parallel, small.shared_norm) == (1, True, True)
    rw = read(tmp_path, name, alibi=True, bias=True)
    assert (rw.num_kv_heads, rw.parallel, rw.rope) == (4, False, None)
    assert rw.alibi_slopes == tuple(slope * 0.25 for slope in alibi_slopes(4))
    newest = read(
        tmp_path,
        "FalconForCausalLM",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    )
    assert (newest.num_kv_heads, newest.shared_norm) == (2, True)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("GPTNeoXForCausalLM", {"head_dim": 8}, "head_dim=8"),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 5}, "num_attention_heads=5"),
        ("GPTNeoXForCausalLM", {"hidden_act": "swish"}, "hidden_act='swish'"),
        ("GPTJForCausalLM", {"rotary_dim": None}, "rotary_dim=None"),
        ("GPTJForCausalLM", {"rotary_dim": 18}, "rotary_dim=18"),
        ("GPTJForCausalLM", {"rotary_dim": 7}, "rotary_dim=7"),
        ("GPTJForCausalLM", {"rope_theta": 500.0}, "rope_theta=500.0"),
        ("FalconForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("FalconForCausalLM", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads=2"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        (
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn=False",
        ),
        (
            "FalconForCausalLM",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm=True",
        ),
        (
            "BloomForCausalLM",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm=True",
        ),
        ("BloomForCausalLM", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact=True"),
        ("BloomForCausalLM", {"n_inner": 100}, "n_inner=100"),
        ("GPTBigCodeForCausalLM", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("PhiForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("StableLmForCausalLM", {"num_key_value_heads": None}, "'num_key_value_heads' is missing"),
        ("StableLmForCausalLM", {"rope_pct": 0.5, "partial_rotary_factor": 0.25}, "rope_pct=0.5"),
        ("NemotronForCausalLM", {"rope_percent": 1.0, "rope_percentage": 0.5}, "rope_percentage"),
        ("Starcoder2ForCausalLM", {"mlp_type": "gated"}, "mlp_type='gated'"),
        ("Starcoder2ForCausalLM", {"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
        ("Starcoder2ForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_is_not_computed_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, architecture, **changes)
    assert named in str(caught.value)


def test_disabled_sliding_window(tmp_path: Path) -> None:
    read(tmp_path, "Starcoder2ForCausalLM", sliding_window=32)
    assert load_model_config(tmp_path).sliding_windows == (32,) * 3
    config = load_model_config(tmp_path, disable_sliding_window=True)
    assert (config.sliding_windows, config.max_model_len) == ((None,) * 3, 32)


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    # 4 heads of their own series, then every other one of the series of 8.
    assert alibi_slopes(6) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)
    assert len(alibi_slopes(71)) == 71


def test_falcon_rounds_slopes_like_torch() -> None:
    slopes = alibi_slopes(71)
    rounded = torch.tensor(slopes).bfloat16().tolist()
    assert [rounded_to_bfloat16(slope) for slope in slopes] == rounded != list(slopes)


@pytest.mark.parametrize(
    ("family", "stored", "buffers", "head"),
    [
        ("gpt_neox", "gpt_neox.", ("layers.0.attention.{}", "layers.2.attention.{}"), "embed_out."),
        ("gptj", "transformer.", ("h.0.attn.{}",), "lm_head."),
        ("falcon", "transformer.", ("h.1.self_attention.{}",), "lm_head."),
        ("bloom", "transformer.", (), "lm_head."),
        ("gpt_bigcode", "transformer.", ("h.1.attn.{}",), "lm_head."),
        ("gpt2", "transformer.", ("h.1.attn.{}",), "lm_head."),
        ("opt", "model.", (), "lm_head."),
        ("stablelm", "model.", ("layers.0.self_attn.{}",), "lm_head."),
    ],
)
def test_old_checkpoints(
    tmp_path: Path, family: str, stored: str, buffers: tuple[str, ...], head: str
) -> None:
    """Those of the bare model lack its prefix; masks and rotary tables were once stored too."""
    folder = make_tiny_checkpoint(tmp_path, family)
    sequences = random_sequences(9)

    def run() -> torch.Tensor:
        config = load_model_config(folder)
        model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
        return log_probs(model, sequences)[0]

    expected = run()
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        name = name.replace("lm_head.", head).replace("embed_out.", head)
        assert name.startswith((stored, head))
        tensors[name.removeprefix(stored)] = tensor
    for place in buffers:
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
            tensors[place.format(name)] = torch.zeros(1, 1, 4, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(run(), expected)


def test_neox_head_under_the_name_of_newer_transformers(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "gpt_neox")
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    assert model.checkpoint_name("lm_head.weight") == "embed_out.weight"
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    model.config = tied
    assert model.checkpoint_name("lm_head.weight") is None
    assert model.checkpoint_name("embed_out.weight") is None


def test_old_falcon_configuration_runs(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "falcon", "grouped")
    sequences = random_sequences(9)
    expected = reference_log_probs(folder, sequences, torch.float32)[0]
    rewrite_config(
        folder,
        architectures=["RWForCausalLM"],
        model_type="RefinedWeb",
        n_head=4,
        n_head_kv=2,
        n_layer=3,
        remove=(
            "num_attention_heads",
            "num_hidden_layers",
            "num_kv_heads",
            "new_decoder_architecture",
            "num_ln_in_parallel_attn",
        ),
    )
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    torch.testing.assert_close(log_probs(model, sequences)[0], expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "variant"),
    [("gpt_neox", "parallel"), ("phi", "head_norms"), ("stablelm", "head_norms"), ("nemotron", "")],
)
def test_bfloat16_stays_close_to_transformers(tmp_path: Path, family: str, variant: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant, dtype=torch.bfloat16)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.bfloat16, device="cpu", show_progress=False)
    sequences = random_sequences(24)
    exact = reference_log_probs(folder, sequences, torch.float32)[0]
    theirs = reference_log_probs(folder, sequences, torch.bfloat16)[0]
    ours = log_probs(model, sequences)[0]
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
