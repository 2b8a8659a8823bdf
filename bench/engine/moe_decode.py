"""Milliseconds per decode step of a mixture of experts, beside what its memory traffic takes.

    python -m bench.engine.moe_decode [--shape mixtral-8x7b] [--batches 1,32] [--out FILE]

Method of bench.engine.decode. A step must read the attention's matrices, the routers, the experts
that some token visits, the head, and the KV cache; how many experts these are is counted in
separate steps without graphs. The limit is these bytes at the speed of a large device copy (bytes
read plus bytes written), measured in the same run. Weights and prompts are random, so is the
routing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bench.common import Rows, bench_parser, numbers, report
from bench.engine.decode import PROMPT, STEPS, ms_per_step
from bench.generation import greedy, seconds
from bench.gpu_timing import copy_bandwidth
from bench.shapes import MOE_SHAPES, Prompts, start
from hetero_llm import LLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts, Router
from hetero_llm.models.layers import Float32Linear, Linear
from hetero_llm.models.registry import model_class

_COUNTED_STEPS = 16


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
    runner = llm.engine.runner
    counts: dict[int, list[int]] = defaultdict(list)  # by rows of the step

    def count(_: Any, __: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        ids = routed[0]
        counts[ids.shape[0]].append(ids.unique().numel())

    routers = [module for module in runner.model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(count) for router in routers]
    try:
        with _without_graphs(runner):
            seconds(llm, prompts.draw(batch, PROMPT), greedy(1 + steps))
    finally:
        for hook in hooks:
            hook.remove()
    decoded = counts[batch]
    assert len(decoded) >= steps * len(routers) * 0.9, (len(decoded), steps, len(routers))
    return float(np.mean(decoded))


def bytes_per_step(
    config: ModelConfig, touched: float, batch: int, context: float
) -> dict[str, float]:
    """What a decode step in bf16 must read, in bytes, by kind; experts maybe in MXFP4.

    Args:
        touched: Experts of a layer that are visited.
        context: Mean tokens of a sequence.
    """
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    one = sum((m.gate_up.numel() + m.down.numel()) // m.down.shape[0] for m in experts)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    matrices = sum(m.weight.numel() * (1 + isinstance(m, Float32Linear)) for m in linears)
    of_expert = 2.0 if config.quantization is None else 0.5 + 2 / 32  # scales are bf16 in memory
    key = config.num_kv_heads * config.head_dim * config.num_layers
    return {
        "experts": of_expert * touched * one,
        "matrices": 2.0 * matrices,
        "kv": 2.0 * 2 * key * batch * context,
    }


def measure(
    llm: LLM, shape: str, batches: list[int], *, bandwidth: float | None, steps: int = STEPS
) -> Rows:
    """One row of the table per batch.

    Args:
        bandwidth: TB/s; None: no limit is known.
    """
    prompts = Prompts(MOE_SHAPES[shape]["vocab_size"])
    rows = []
    for batch in batches:
        ms = ms_per_step(llm, prompts, batch, steps=steps)
        touched = experts_touched(llm, prompts, batch, min(steps, _COUNTED_STEPS))
        config = llm.engine.runner.model.config
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
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(MOE_SHAPES), default="mixtral-8x7b")
    parser.add_argument("--batches", type=numbers, default=[1, 32])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    bandwidth = None
    if args.device != "cpu" and torch.cuda.is_available():
        bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
    llm, ready = start(
        MOE_SHAPES[args.shape], dtype="bfloat16", device=args.device, max_model_len=1024,
        max_num_batched_tokens=8192, max_num_seqs=max(args.batches),
        cpu_backend="torch",  # whose routers tell which experts they chose
    )  # fmt: skip
    with llm:
        rows = measure(llm, args.shape, args.batches, bandwidth=bandwidth, steps=args.steps)
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s; copy {bandwidth} TB/s")
    about = {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "copy_tb_s": bandwidth}
    report(f"moe_decode.{args.shape}", about, rows, args.out)


if __name__ == "__main__":
    main()
