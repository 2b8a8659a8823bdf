"""Configurations of tiny checkpoints: mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_basic import GATED, rope

# transformers' grouped products need rows of 16 bytes in bfloat16.
_GATED = {**GATED, "intermediate_size": 56}
_NO_HEAD_DIM = {k: v for k, v in _GATED.items() if k != "head_dim"}
_MIXTRAL = {**_GATED, "num_local_experts": 4}
_QWEN = {
    **_NO_HEAD_DIM,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
_QWEN3 = {k: v for k, v in _QWEN.items() if k != "shared_expert_intermediate_size"}
_GLM = {
    **_GATED,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_MINIMAX = {**_GATED, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3}
_PHI = {**_NO_HEAD_DIM, "num_local_experts": 5}
# The context fits the original one, so it is the short factors that count.
_LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.3, 2.0, 3.5],
    long_factor=[1.5, 2.5, 4.0, 9.0],
    short_mscale=1.2,
    long_mscale=1.3,
    original_max_position_embeddings=64,
)

_OSS = {
    **_GATED,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "pad_token_id": 0,
}

# family -> (transformers class prefix, class suffix, variant -> configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "mixtral": (
        "Mixtral",
        "ForCausalLM",
        {
            "full": _MIXTRAL,
            "window_tied": {**_MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True},
            "heads_of_16": {**_MIXTRAL, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"},
            "three_of_seven": {
                **_MIXTRAL,
                "num_local_experts": 7,
                "num_experts_per_tok": 3,
                **rope("linear", factor=4.0),
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {
            "full": _QWEN,
            "renormalized": {**_QWEN, "norm_topk_prob": True, "qkv_bias": False},
            "every_second": {**_QWEN, "decoder_sparse_step": 2, "tie_word_embeddings": True},
            "dense_first": {**_QWEN, "mlp_only_layers": [0], "intermediate_size": 36},
            "windows": {
                **_QWEN,
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 3,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {
            "full": {**_QWEN3, "norm_topk_prob": True, "head_dim": 16, "mlp_only_layers": [2]},
            "every_second": {
                **_QWEN3,
                "decoder_sparse_step": 2,
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 5,
                "tie_word_embeddings": True,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        "ForCausalLM",
        {
            "full": {
                **_GLM,
                "head_dim": 16,
                "use_qk_norm": True,
                "attention_bias": True,
                "routed_scaling_factor": 2.5,
            },
            "groups": {
                **_GLM,
                "n_routed_experts": 12,
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 4,
                "n_shared_experts": 2,
                "norm_topk_prob": False,
                "first_k_dense_replace": 0,
                "tie_word_embeddings": True,
                **rope("linear", factor=4.0, partial_rotary_factor=1.0),
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        "ForCausalLM",
        {
            "half_rotated": {**_MINIMAX, "head_dim": 16, "rotary_dim": 8},
            "tied": {**_MINIMAX, "tie_word_embeddings": True, "num_key_value_heads": 1},
        },
    ),
    "phimoe": (
        "Phimoe",
        "ForCausalLM",
        {
            "full": {**_PHI, "attention_bias": True, "lm_head_bias": True},
            # Much jitter: several experts near the best one.
            "bare": {**_PHI, "sliding_window": 5, "router_jitter_noise": 0.3},
            "tied": {**_PHI, "lm_head_bias": True, "tie_word_embeddings": True},
            "longrope": {**_PHI, **_LONGROPE},
        },
    ),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        {
            # YaRN by default; a limit that some gates and ups reach.
            "heads_of_16": {**_OSS, "head_dim": 16, "swiglu_limit": 0.4},
            "full": {
                **_OSS,
                "layer_types": ["full_attention"] * 3,
                "attention_bias": False,
                "tie_word_embeddings": True,
                **rope("default"),
            },
        },
    ),
}
