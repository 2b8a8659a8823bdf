"""Configurations of tiny checkpoints: the families with which the engine began."""

from __future__ import annotations

from typing import Any

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 64}
GATED = {
    **SIZES,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {**SIZES, "num_attention_heads": 4, "ffn_dim": 48, "pad_token_id": 1}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(rope_type: str, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **scaling}}


_LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

# family -> (transformers class prefix, class suffix, variant -> configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "llama": (
        "Llama",
        "ForCausalLM",
        {
            "gqa": GATED,
            "mha": {**GATED, "num_key_value_heads": 4},
            "mqa": {**GATED, "num_key_value_heads": 1},
            "wide_heads": {**GATED, "head_dim": 12},
            "heads_of_16": {**GATED, "head_dim": 16},
            "biases": {**GATED, "attention_bias": True, "mlp_bias": True},
            "tied": {**GATED, "tie_word_embeddings": True},
            "llama3": {**GATED, **_LLAMA3},
            "linear": {**GATED, **rope("linear", factor=4.0)},
            "yarn": {
                **GATED,
                **rope("yarn", factor=4.0, original_max_position_embeddings=16),
            },
            "yarn_mscale": {
                **GATED,
                **rope(
                    "yarn",
                    factor=4.0,
                    original_max_position_embeddings=16,
                    mscale=0.8,
                    mscale_all_dim=0.5,
                    beta_fast=16.0,
                    beta_slow=2.0,
                    truncate=False,
                ),
            },
            "dynamic": {
                **GATED,
                "max_position_embeddings": 24,
                **rope("dynamic", factor=2.0),
            },
        },
    ),
    "mistral": (
        "Mistral",
        "ForCausalLM",
        {
            "window": {**GATED, "sliding_window": 5},
            "full": {**GATED, "sliding_window": None},
        },
    ),
    "qwen2": (
        "Qwen2",
        "ForCausalLM",
        {
            "full": {k: v for k, v in GATED.items() if k != "head_dim"},
            "window_mix": {**GATED, **_WINDOW},
            "layer_types": {
                **GATED,
                **_WINDOW,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "tie_word_embeddings": True,
            },
        },
    ),
    "qwen3": (
        "Qwen3",
        "ForCausalLM",
        {
            "full": {**GATED, "head_dim": 16},
            "window_mix": {**GATED, **_WINDOW},
            "tied_biases": {**GATED, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "opt": (
        "OPT",
        "ForCausalLM",
        {
            "pre_norm": _OPT,
            "heads_of_16": {**_OPT, "hidden_size": 64, "word_embed_proj_dim": 64},
            "post_norm": {**_OPT, "do_layer_norm_before": False},
            "projections": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20},
            "no_final_norm": {**_OPT, "_remove_final_layer_norm": True},
            "bare": {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
            "untied_gelu": {**_OPT, "tie_word_embeddings": False, "activation_function": "gelu"},
        },
    ),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {
            "tied": _GPT2,
            "untied_inner": {**_GPT2, "tie_word_embeddings": False, "n_inner": 40},
            "unscaled": {**_GPT2, "scale_attn_weights": False},
        },
    ),
}
