"""Models of well-known shapes with random weights: their config.json, sizes, engines and prompts.

`SHAPES` and `MOE_SHAPES` are published config.json files, without keys that change nothing here.
`CPU_SHAPES` are small ones for the CPU benches: S, M and L are the shapes that the peers' models
were converted from; `draft-68m` has the sizes of S with six heads of 128. `tiny` is for trying the
benches on a small machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # peers' environments, which only need the shapes, lack what the engine imports
    from hetero_llm import LLM

Config = dict[str, Any]


def _sizes(hidden: int, inner: int, *, layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_LLAMA: Config = {
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

SHAPES: dict[str, Config] = {
    "llama-3.1-8b": {
        **_LLAMA_3,
        **_sizes(4096, 14336, layers=32, heads=32, kv_heads=8),
        "rope_scaling": {**_LLAMA_3_SCALING, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        **_LLAMA_3,
        **_sizes(8192, 28672, layers=80, heads=64, kv_heads=8),
        "rope_scaling": {**_LLAMA_3_SCALING, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        **_sizes(2048, 8192, layers=16, heads=32, kv_heads=8),
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
        **_sizes(4096, 14336, layers=32, heads=32, kv_heads=8),
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
        **_sizes(3584, 18944, layers=28, heads=28, kv_heads=4),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_LLAMA,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        **_sizes(64, 128, layers=2, heads=4, kv_heads=2),
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}

_SMALL: Config = {
    **_LLAMA,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_S = {
    **_SMALL,
    **_sizes(768, 3072, layers=2, heads=12, kv_heads=12),
    "vocab_size": 32000,
}

CPU_SHAPES: dict[str, Config] = {
    "S": _S,
    "M": {
        **_SMALL,
        **_sizes(576, 1536, layers=30, heads=9, kv_heads=3),
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "L": {
        **_SMALL,
        **_sizes(2048, 5632, layers=22, heads=32, kv_heads=4),
        "vocab_size": 32000,
    },
    "draft-68m": {**_S, "num_attention_heads": 6, "num_key_value_heads": 6},
    "tiny": SHAPES["tiny"],
}

_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "eos_token_id": 200002,
    "max_position_embeddings": 131072,
    **_sizes(2880, 2880, layers=24, heads=64, kv_heads=8),
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_theta": 150000,
}

_QWEN3_MOE: Config = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    **_sizes(2048, 6144, layers=48, heads=32, kv_heads=4),
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

MOE_SHAPES: dict[str, Config] = {
    "mixtral-8x7b": {
        **SHAPES["mistral-7b"],
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen1.5-moe-a2.7b": {
        **SHAPES["qwen2.5-7b"],
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        **_sizes(2048, 5632, layers=24, heads=16, kv_heads=16),
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "max_window_layers": 24,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        **_sizes(4096, 12288, layers=94, heads=64, kv_heads=4),
        "moe_intermediate_size": 1536,
    },
    "tiny-qwen3-moe": {
        **_QWEN3_MOE,
        **_sizes(256, 256, layers=4, heads=4, kv_heads=2),
        "vocab_size": 2048,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "glm-4.5-air": {
        **_LLAMA,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        **_sizes(4096, 10944, layers=46, heads=96, kv_heads=8),
        "moe_intermediate_size": 1408,
        "head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {**_GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}},
    "gpt-oss-20b-bf16": _GPT_OSS,
    "tiny": {
        **SHAPES["tiny"],
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
}

ALL_SHAPES = {**MOE_SHAPES, **SHAPES}
"""Of both kinds, by name."""

_FIRST_PLAIN_ID = 3  # below are the special ids of the shapes with small vocabularies


def write_config(config: Config, folder: Path) -> Path:
    """Writes config.json alone: for `load_format="dummy"` and `skip_tokenizer_init=True`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def start(config: Config, **engine_args: Any) -> tuple[LLM, float]:
    """An engine with seeded random weights, and the seconds until it was ready.

    The CUDA context, which any program pays for, is made before the clock starts.
    """
    from hetero_llm import LLM

    if torch.cuda.is_available() and engine_args.get("device") != "cpu":
        torch.empty(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, Path(folder))
        begin = time.perf_counter()
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine_args)
        return llm, time.perf_counter() - begin


class Prompts:
    """Random prompts, each drawn once, so that no cache has seen any of them."""

    def __init__(self, vocab_size: int, seed: int | list[int] = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        """`count` lists of `length` token ids."""
        return self._rng.integers(_FIRST_PLAIN_ID, self._vocab_size, (count, length)).tolist()

    def one(self, length: int) -> list[int]:
        """One prompt of `length` token ids."""
        return self.draw(1, length)[0]


def linear_sizes(config: Config) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(out, in) of the products of one Llama layer, and of the head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    layer = [
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer, (config["vocab_size"], hidden)


def layer_parameters(config: Config) -> int:
    """Parameters of the linear layers without the head: two floating-point operations each per
    prompt token. (A prefill applies the head to one token only.)
    """
    layer, _ = linear_sizes(config)
    return int(config["num_hidden_layers"]) * sum(out * depth for out, depth in layer)


def streamed_parameters(config: Config) -> int:
    """Parameters read in every decode step: all linear layers with the head, and the norms."""
    _, (vocab, hidden) = linear_sizes(config)
    norms = (2 * int(config["num_hidden_layers"]) + 1) * hidden
    return layer_parameters(config) + vocab * hidden + norms


INT4_BYTES = 19 / 32
"""Of a weight that the CPU executor has rounded to int4; its head has one byte."""


def step_bytes(config: Config, weight_bytes: float) -> float:
    """Bytes read in every decode step of weights with `weight_bytes` each; a head of less than one
    byte has one."""
    _, (vocab, hidden) = linear_sizes(config)
    head = vocab * hidden
    return (streamed_parameters(config) - head) * weight_bytes + head * max(weight_bytes, 1.0)


def parameters(config: Config) -> int:
    """Parameters of the model."""
    _, (vocab, hidden) = linear_sizes(config)
    untied = not config.get("tie_word_embeddings", False)
    return streamed_parameters(config) + (vocab * hidden if untied else 0)
