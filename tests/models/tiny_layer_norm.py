"""Configurations of tiny checkpoints: families with layer norms."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_basic import SIZES, rope

_HEADS = {**SIZES, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
_INNER = {**_HEADS, "intermediate_size": 52}
_GPT = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BLOOM = {"hidden_size": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_HALF = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
_LINEAR = rope("linear", factor=4.0, partial_rotary_factor=0.5)
_GROUPED = {**_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2}
_SEQUENTIAL = {**_HEADS, "parallel_attn": False, "multi_query": False}
_STABLELM = {**_INNER, "num_key_value_heads": 2, **_HALF}
_NEMOTRON = {**_INNER, "num_key_value_heads": 2, "head_dim": 8, **_HALF}
_STARCODER2 = {**_INNER, "num_key_value_heads": 2}

# family -> (transformers class prefix, class suffix, variant -> configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "gpt_neox": (
        "GPTNeoX",
        "ForCausalLM",
        {
            "parallel": {**_INNER, **_HALF},
            "sequential_heads_of_16": {
                **_INNER,
                "hidden_size": 64,
                "use_parallel_residual": False,
                "hidden_act": "gelu_fast",
            },
            "no_bias_linear": {
                **_INNER,
                **_LINEAR,
                "attention_bias": False,
                "tie_word_embeddings": True,
            },
        },
    ),
    "gptj": (
        "GPTJ",
        "ForCausalLM",
        {
            "partial": {**_GPT, "rotary_dim": 4},
            "whole_heads": {**_GPT, "rotary_dim": 8, "n_inner": 40, "activation_function": "relu"},
            "tied_share": {**_GPT, "n_embd": 80, "rotary_dim": 6, "tie_word_embeddings": True},
        },
    ),
    "falcon": (
        "Falcon",
        "ForCausalLM",
        {
            "multi_query": _HEADS,
            "grouped": {**_GROUPED, "tie_word_embeddings": False},
            "grouped_one_norm": {**_GROUPED, "num_ln_in_parallel_attn": 1, "bias": True},
            "alibi": {**_SEQUENTIAL, "alibi": True, "bias": True, "ffn_hidden_size": 40},
            "alibi_6_heads": {
                **_HEADS,
                "hidden_size": 48,
                "num_attention_heads": 6,
                "alibi": True,
                "activation": "gelu_pytorch_tanh",
            },
            "sequential": {**_SEQUENTIAL, **rope("linear", factor=2.0)},
            "multi_head": {**_HEADS, "multi_query": False},
        },
    ),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        {
            "heads_of_8": _BLOOM,
            "untied_6_heads": {
                **_BLOOM,
                "hidden_size": 48,
                "n_head": 6,
                "tie_word_embeddings": False,
            },
        },
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        "ForCausalLM",
        {
            "multi_query": _GPT,
            "multi_head": {**_GPT, "multi_query": False, "tie_word_embeddings": False},
            "unscaled": {
                **_GPT,
                "scale_attn_weights": False,
                "n_inner": 40,
                "activation_function": "gelu",
            },
        },
    ),
    "phi": (
        "Phi",
        "ForCausalLM",
        {
            "partial": {**_INNER, **_HALF},
            "head_norms": {**_INNER, "hidden_size": 64, "num_key_value_heads": 2, **_HALF}
            | {"qk_layernorm": True, "tie_word_embeddings": True},
        },
    ),
    "stablelm": (
        "StableLm",
        "ForCausalLM",
        {
            "sequential": _STABLELM,
            "head_norms": {**_STABLELM, "qk_layernorm": True, "use_parallel_residual": True},
            "biases": {
                **_STABLELM,
                "use_qkv_bias": True,
                "hidden_act": "gelu",
                "tie_word_embeddings": True,
            },
        },
    ),
    "nemotron": (
        "Nemotron",
        "ForCausalLM",
        {
            "partial": _NEMOTRON,
            "biases": {
                **_NEMOTRON,
                "head_dim": 16,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        },
    ),
    "starcoder2": (
        "Starcoder2",
        "ForCausalLM",
        {
            "window": {**_STARCODER2, "sliding_window": 5},
            "no_bias": {**_STARCODER2, "use_bias": False, "tie_word_embeddings": False},
        },
    ),
}
