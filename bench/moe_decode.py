"""Milliseconds per decode step of a mixture of experts, beside what its memory traffic takes.

    python -m bench.moe_decode [--shape mixtral-8x7b] [--batches 1,32] [--out FILE]

Method of bench.decode. A step must read the attention's matrices, the routers, the experts that
some row visits, the head, and the KV cache; how many experts these are is counted in steps of their
own, without graphs. The limit is these bytes at the speed of a large device copy (bytes read plus
bytes written), measured in the same run. Weights and prompts are random, so is the routing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import print_table, write_results
from bench.decode import PROMPT, STEPS, batch_list, ms_per_step, params_for, seconds
from bench.gpu_timing import copy_bandwidth
from bench.shapes import Prompts
from hetero_llm import LLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts, SparseMixerRouter, TopKRouter
from hetero_llm.models.layers import Linear
from hetero_llm.models.registry import model_class

_COMMON = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# The published config.json files, without keys that change nothing here.
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "qwen1.5-moe-a2.7b": {
        **_COMMON,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "use_sliding_window": False,
    },
    # For trying the bench on a small machine.
    "tiny": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
}
_COUNTED_STEPS = 16


class ShapePrompts(Prompts):
    """`Prompts` of one of this bench's shapes."""

    def __init__(self, shape: str, seed: int = 0) -> None:
        self._vocab = SHAPES[shape]["vocab_size"]
        self._rng = np.random.default_rng(seed)


def start(shape: str, **engine_args: Any) -> tuple[LLM, float]:
    """An engine with seeded random weights of `shape`, and the seconds until it was ready."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]) + "\n")
        begin = time.perf_counter()
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine_args)
        return llm, time.perf_counter() - begin


@contextmanager
def _without_graphs(runner: Any) -> Iterator[None]:
    """Steps call the modules while it is open; the runner keeps its graphs for later."""
    graphs = getattr(runner, "graphs", None)
    if graphs is not None:
        runner.graphs = None
    try:
        yield
    finally:
        if graphs is not None:
            runner.graphs = graphs


def experts_touched(llm: LLM, prompts: Prompts, batch: int, steps: int = _COUNTED_STEPS) -> float:
    """Mean number of experts that a decode step of `batch` rows visits, in one layer."""
    runner = llm._engine_parts().engine._runner
    counts: dict[int, list[int]] = defaultdict(list)  # by rows of the step

    def count(_: Any, __: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        ids = routed[0]
        counts[ids.shape[0]].append(ids.unique().numel())

    routers = [
        module
        for module in runner._model.modules()
        if isinstance(module, (TopKRouter, SparseMixerRouter))
    ]
    hooks = [router.register_forward_hook(count) for router in routers]
    try:
        with _without_graphs(runner):
            params = params_for(1 + steps, sampling=False)
            seconds(llm, prompts.draw(batch, PROMPT), params)
    finally:
        for hook in hooks:
            hook.remove()
    decoded = counts[batch]
    assert len(decoded) >= steps * len(routers) * 0.9, (len(decoded), steps, len(routers))
    return float(np.mean(decoded))


def bytes_per_step(
    config: ModelConfig, touched: float, batch: int, context: float
) -> dict[str, float]:
    """What a decode step in bf16 must read, in bytes, by kind.

    Args:
        touched: Experts of a layer that are visited.
        context: Mean tokens of a sequence.
    """
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    one = sum((m.gate_up.numel() + m.down.numel()) // m.down.shape[0] for m in experts)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    key = config.num_kv_heads * config.head_dim * config.num_layers
    return {
        "experts": 2.0 * touched * one,
        "matrices": 2.0 * matrices,
        "kv": 2.0 * 2 * key * batch * context,
    }


def measure(
    llm: LLM, shape: str, batches: list[int], *, bandwidth: float | None, steps: int = STEPS
) -> list[dict[str, Any]]:
    """One row of the table per batch.

    Args:
        bandwidth: TB/s; None: no limit is known.
    """
    prompts = ShapePrompts(shape)
    rows = []
    for batch in batches:
        ms = ms_per_step(llm, prompts, batch, steps=steps)
        touched = experts_touched(llm, prompts, batch, min(steps, _COUNTED_STEPS))
        config = llm._engine_parts().engine._runner._model.config
        read = bytes_per_step(config, touched, batch, PROMPT + steps / 2)
        limit = None if bandwidth is None else sum(read.values()) / bandwidth / 1e9
        rows.append(
            {
                "batch": batch,
                "ms_per_step": ms,
                "experts_touched": touched,
                **{f"{kind}_gb": count / 1e9 for kind, count in read.items()},
                "limit_ms": "-" if limit is None else limit,
                "share_of_limit": "-" if limit is None else limit / ms,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="mixtral-8x7b")
    parser.add_argument("--batches", type=batch_list, default=[1, 32])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    bandwidth = None
    if args.device != "cpu" and torch.cuda.is_available():
        bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
    llm, ready = start(
        args.shape, dtype="bfloat16", device=args.device, max_model_len=1024,
        max_num_batched_tokens=8192, max_num_seqs=max(args.batches),
    )  # fmt: skip
    with llm:
        rows = measure(llm, args.shape, args.batches, bandwidth=bandwidth, steps=args.steps)
    result = {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "copy_tb_s": bandwidth}
    write_results(f"moe_decode.{args.shape}", {**result, "rows": rows}, args.out)
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s; copy {bandwidth} TB/s")
    print_table(rows)


if __name__ == "__main__":
    main()
