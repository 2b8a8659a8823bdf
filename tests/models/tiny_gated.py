"""Configurations of tiny checkpoints: gated families beyond Llama."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_basic import GATED, SIZES, rope

# transformers' Phi3 takes the head size from the hidden size for the checks of longrope.
_PHI3 = {
    **SIZES,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The context fits the original one, so it is the short factors that count.
_LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.3, 2.0, 3.5],
    long_factor=[1.5, 2.5, 4.0, 9.0],
    attention_factor=1.2,
)
_GEMMA2 = {
    **GATED,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "sliding_window": 5,
    "query_pre_attn_scalar": 20,
}
_GLM = {**GATED, "pad_token_id": 0}
_MIXED = ["full_attention", "sliding_attention", "sliding_attention"]

# family -> (transformers class prefix, class suffix, variant -> configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "gemma": (
        "Gemma",
        "ForCausalLM",
        {
            "tied_biases": {**GATED, "head_dim": 16, "attention_bias": True},
        },
    ),
    "glm": (
        "Glm",
        "ForCausalLM",
        {
            "half_rotated": {**_GLM, "head_dim": 16},
            "all_rotated_tied": {
                **_GLM,
                "attention_bias": False,
                "tie_word_embeddings": True,
                **rope("linear", factor=4.0, partial_rotary_factor=1.0),
            },
        },
    ),
    "glm4": (
        "Glm4",
        "ForCausalLM",
        {
            "half_rotated": {**_GLM, "head_dim": 16, "attention_bias": False},
            "yarn": {
                **_GLM,
                "tie_word_embeddings": True,
                **rope("yarn", factor=4.0, original_max_position_embeddings=16),
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        "ForCausalLM",
        {
            "soft_caps": _GEMMA2,
            "layer_types": {
                **_GEMMA2,
                "layer_types": _MIXED,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "hidden_activation": "silu",
            },
        },
    ),
    "phi3": (
        "Phi3",
        "ForCausalLM",
        {
            "partial_window_tied": {
                **_PHI3,
                "sliding_window": 5,
                "tie_word_embeddings": True,
                **rope("default", partial_rotary_factor=0.5),
            },
            "longrope": {**_PHI3, **_LONGROPE},
        },
    ),
}
