"""config.json in all spellings, and the message for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import FAMILIES, model_class

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {**MISTRAL, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**MISTRAL, "architectures": ["Qwen3ForCausalLM"]}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def load(
    folder: Path, raw: dict[str, Any], *, generation: dict[str, Any] | None = None, **options: Any
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder, **options)


def test_overrides_change_the_file(tmp_path: Path) -> None:
    mapping = {"factor": 8.0}
    scaled = load(tmp_path, {**LLAMA, "rope_scaling": {**YARN}}, hf_overrides={
        "max_position_embeddings": 64,
        "rope_scaling": mapping,
    })  # fmt: skip
    by_hand = load(
        tmp_path,
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {**YARN, **mapping}},
    )
    assert scaled == by_hand
    named = load(
        tmp_path,
        {**LLAMA, "architectures": ["OwnForCausalLM"]},
        hf_overrides={"architectures": ["LlamaForCausalLM"]},
    )
    assert named == load(tmp_path, LLAMA, hf_overrides={})
    with pytest.raises(ModelLoadError, match="num_hidden_layers=0"):
        load(tmp_path, LLAMA, hf_overrides={"num_hidden_layers": 0})


def test_overrides_in_the_spelling_that_the_file_does_not_have(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters and dtype, which win over the older keys."""
    new = {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_type": "default",
                                                               "rope_theta": 5000.0}}  # fmt: skip
    theta = load(tmp_path, new, hf_overrides={"rope_theta": 7.0}).rope
    assert theta is not None and theta.theta == 7.0
    scaling = {"type": "linear", "factor": 4.0}
    both = load(tmp_path, new, hf_overrides={"rope_scaling": scaling, "rope_theta": 7.0}).rope
    assert both is not None
    assert (both.theta, both.scaling_type, both.factor) == (7.0, "linear", 4.0)
    plain = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    none = load(tmp_path, {**new, "rope_parameters": plain}, hf_overrides={"rope_scaling": None})
    assert none.rope is not None
    assert (none.rope.theta, none.rope.scaling_type) == (5000.0, "default")
    nested = {"rope_parameters": {"full_attention": dict(plain), "sliding_attention": dict(plain)}}
    alike = load(tmp_path, {**new, **nested}, hf_overrides={"rope_theta": 9.0}).rope
    assert alike is not None and (alike.theta, alike.factor) == (9.0, 2.0)
    with pytest.raises(ModelLoadError, match="rope_parameters=5: a JSON object is needed"):
        load(tmp_path, new, hf_overrides={"rope_scaling": 5})
    dtype = load(tmp_path, {**without(LLAMA, "torch_dtype"), "dtype": "float32"},
                 hf_overrides={"torch_dtype": "bfloat16"})  # fmt: skip
    assert dtype.torch_dtype == "bfloat16"


def without(raw: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != key}


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.attn_scale == 8**-0.5
    assert config.max_model_len == 128
    assert config.torch_dtype == "float32"
    assert config.norm_eps == 1e-6
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    assert config.sliding_windows == (None,) * 4
    assert config.rope is not None
    assert (config.rope.theta, config.rope.scaling_type) == (10000.0, "default")


def test_null_head_dim_and_kv_heads(tmp_path: Path) -> None:
    config = load(tmp_path, {**LLAMA, "head_dim": None, "num_key_value_heads": None})
    assert (config.head_dim, config.num_kv_heads) == (8, 4)
    assert load(tmp_path, {**MISTRAL, "head_dim": 12}).head_dim == 12
    assert load(tmp_path, QWEN3).head_dim == 128
    assert load(tmp_path, {**QWEN3, "head_dim": None}).head_dim == 8


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype_in_both_spellings(tmp_path: Path, key: str, value: str) -> None:
    assert load(tmp_path, {**LLAMA, key: value}).torch_dtype == "bfloat16"


def test_eos_of_both_files(tmp_path: Path) -> None:
    raw = {**LLAMA, "eos_token_id": 2, "bos_token_id": 1}
    config = load(tmp_path, raw, generation={"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (2, 7, 9)
    assert config.bos_token_id == 1
    config = load(tmp_path, LLAMA, generation={"eos_token_id": 5, "bos_token_id": 4})
    assert (config.eos_token_ids, config.bos_token_id) == ((5,), 4)


def test_rope_spellings_agree(tmp_path: Path) -> None:
    scaling = {k: v for k, v in YARN.items() if k != "rope_type"}
    new = {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 500.0}}
    old = {**LLAMA, "rope_theta": 500.0, "rope_scaling": YARN}
    older = {**LLAMA, "rope_theta": 500.0, "rope_scaling": {"type": "yarn", **scaling}}
    nested = {**LLAMA, "rope_parameters": {"full_attention": new["rope_parameters"]}}
    expected = load(tmp_path, new)
    assert expected.rope is not None
    assert expected.rope.theta == 500.0
    assert expected.max_model_len == 128
    for raw in (old, older, nested):
        assert load(tmp_path, raw) == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 128),
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        (YARN, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({**YARN, "factor": None}, 128),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            128,
        ),
    ],
)
def test_context_length_with_rope_scaling(tmp_path: Path, scaling: Any, expected: int) -> None:
    assert load(tmp_path, {**LLAMA, "rope_scaling": scaling}).max_model_len == expected


def test_users_rope_replaces_the_files(tmp_path: Path) -> None:
    raw = {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 500.0}}
    config = load(tmp_path, raw, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=700)
    assert config.rope is not None
    assert (config.rope.scaling_type, config.rope.theta) == ("linear", 700.0)
    assert config.max_model_len == 256
    config = load(tmp_path, raw, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope is not None
    assert config.rope.theta == 500.0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rope_scaling": {"rope_type": "cubic"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "facctor": 1}}, "rope_scaling"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
    ],
)
def test_users_rope_mistakes(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, LLAMA, **options)
    assert caught.value.field == field


def test_sliding_windows(tmp_path: Path) -> None:
    assert load(tmp_path, MISTRAL).sliding_windows == (4096,) * 4
    assert load(tmp_path, {**MISTRAL, "sliding_window": None}).sliding_windows == (None,) * 4
    assert load(tmp_path, {**MISTRAL, "sliding_window": 16}).sliding_windows == (16,) * 4
    window = {"sliding_window": 16, "max_window_layers": 3}
    for family in (QWEN2, QWEN3):
        assert load(tmp_path, {**family, **window}).sliding_windows == (None,) * 4
        used = {**family, **window, "use_sliding_window": True}
        assert load(tmp_path, used).sliding_windows == (None, None, None, 16)
        mixed = ["sliding_attention", "full_attention"] * 2
        config = load(tmp_path, {**used, "layer_types": mixed})
        assert config.sliding_windows == (16, None, 16, None)


def test_disable_sliding_window_caps_the_context(tmp_path: Path) -> None:
    raw = {**MISTRAL, "sliding_window": 16}
    config = load(tmp_path, raw, disable_sliding_window=True)
    assert (config.max_model_len, config.sliding_windows) == (16, (None,) * 4)
    assert load(tmp_path, raw).max_model_len == 128
    assert load(tmp_path, LLAMA, disable_sliding_window=True).max_model_len == 128


MIXED_LAYERS = ["sliding_attention"] + ["full_attention"] * 3


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        *((without(LLAMA, key), key) for key in LLAMA if key != "model_type"),
        (without(MISTRAL, "num_key_value_heads"), "num_key_value_heads"),
        ({**LLAMA, "architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({**LLAMA, "architectures": None}, "architectures"),
        ({**LLAMA, "hidden_size": "32"}, "hidden_size"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**LLAMA, "num_attention_heads": 5}, "num_attention_heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**LLAMA, "hidden_act": "swiglu"}, "hidden_act"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({**LLAMA, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**LLAMA, "quantization_config": "fp8"}, "quantization_config"),
        ({**LLAMA, "sliding_window": 16}, "sliding_window"),
        ({**LLAMA, "layer_types": MIXED_LAYERS}, "layer_types"),
        ({**MISTRAL, "layer_types": MIXED_LAYERS}, "layer_types"),
        ({**QWEN2, "layer_types": MIXED_LAYERS}, "layer_types"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types"),
        ({**LLAMA, "head_dim": 7}, "head_dim"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({**LLAMA, "rope_scaling": [1]}, "rope_scaling"),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({**LLAMA, "rope_scaling": {"type": "default", "factor": 2.0}}, "factor"),
        (
            {
                **LLAMA,
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "original_max_position_embeddings",
        ),
        (
            {
                **QWEN3,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "per layer type",
        ),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ({**GPT2, "n_head": 5}, "n_head"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(tmp_path, raw)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, {**LLAMA, "architectures": ["NoSuchForCausalLM"]})
    usual = "ForCausalLM"
    first, _, short = str(caught.value).partition(f", and with {usual} at the end: ")
    listed = {*first.split("supported are ")[1].split(", ")}
    assert listed | {name + usual for name in short.split(", ")} == set(FAMILIES)
    with pytest.raises(ModelLoadError, match="NoSuchForCausalLM"):
        model_class("NoSuchForCausalLM")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        load_model_config(tmp_path)


def test_damaged_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        load(tmp_path, LLAMA)
