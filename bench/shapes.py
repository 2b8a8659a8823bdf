"""Models of well-known shapes with random weights, and how the serving benches start them.

The dictionaries are the published config.json files, without keys that change nothing here.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_llm import LLM

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}
_LLAMA_3 = {
    **_LLAMA,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {**_LLAMA_3_SCALING, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": {**_LLAMA_3_SCALING, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    # Version 0.2: full attention; 0.1 has the same sizes and a window of 4096.
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    # Biases of q, k and v come with the architecture.
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    # For trying the benches on a small machine.
    "tiny": {
        **_LLAMA,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}

_FIRST_PLAIN_ID = 3  # below are the special ids of the shapes with small vocabularies


def write_shape(shape: str, folder: Path) -> Path:
    """Writes config.json alone: for `load_format="dummy"` and `skip_tokenizer_init=True`."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1) + "\n")
    return folder


def start(shape: str, **engine_args: Any) -> tuple[LLM, float]:
    """An engine with seeded random weights of `shape`, and the seconds until it was ready.

    The CUDA context, which any program pays for, is made before the clock starts.
    """
    if torch.cuda.is_available() and engine_args.get("device") != "cpu":
        torch.empty(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        begin = time.perf_counter()
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine_args)
        return llm, time.perf_counter() - begin


class Prompts:
    """Random prompts, each drawn once, so that no cache has seen any of them."""

    def __init__(self, shape: str, seed: int = 0) -> None:
        self._vocab = SHAPES[shape]["vocab_size"]
        self._rng = np.random.default_rng(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        """`count` lists of `length` token ids."""
        ids = self._rng.integers(_FIRST_PLAIN_ID, self._vocab, (count, length))
        return ids.tolist()


def linear_sizes(shape: str) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(out, in) of the products of one layer, and of the head."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    layer = [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer, (config["vocab_size"], hidden)
