"""Small models with random weights for the CPU benches, and what one step of them has to move.

S, M and L are the shapes that the peers of the CPU benches were converted from; `draft-68m` has the
sizes of S with six heads of 128.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_S = {
    **_COMMON,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
}

CPU_SHAPES: dict[str, dict[str, Any]] = {
    "S": _S,
    "M": {
        **_COMMON,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "L": {
        **_COMMON,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "draft-68m": {**_S, "num_attention_heads": 6, "num_key_value_heads": 6},
    # For trying the benches.
    "tiny": {
        **_COMMON,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def write_shape(shape: str, folder: Path) -> Path:
    """Writes config.json alone: for `load_format="dummy"` and `skip_tokenizer_init=True`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CPU_SHAPES[shape], indent=1) + "\n")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def linear_sizes(config: dict[str, Any]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(out, in) of the products of one Llama layer, and of the head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim") or hidden // heads
    layer = [
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer, (config["vocab_size"], hidden)


def layer_parameters(config: dict[str, Any]) -> int:
    """Of the linear layers without the head: two floating-point operations each per prompt token.

    A prefill applies the head to one row only.
    """
    layer, _ = linear_sizes(config)
    return int(config["num_hidden_layers"]) * sum(out * depth for out, depth in layer)


def streamed_parameters(config: dict[str, Any]) -> int:
    """Read in every decode step: all linear layers with the head, and the norms."""
    _, (vocab, hidden) = linear_sizes(config)
    norms = (2 * int(config["num_hidden_layers"]) + 1) * hidden
    return layer_parameters(config) + vocab * hidden + norms


def parameters(config: dict[str, Any]) -> int:
    """All of them."""
    _, (vocab, hidden) = linear_sizes(config)
    untied = not config.get("tie_word_embeddings", False)
    return streamed_parameters(config) + (vocab * hidden if untied else 0)
