"""Milliseconds of the layers of a mixture of experts through the native CPU executor.

    python -m bench.kernels.cpu_experts [--shape mixtral-8x7b] [--layers 1] [--threads 2]

A step of `rows` tokens, one each of as many sequences, of a model with the shape's experts and next
to nothing else: one head of 128, 512 tokens of vocabulary. Weights are random, so is the routing;
`experts` counts those that a layer's tokens chose, the mean of the layers. `gb_s` is what the step
must read, in the weights' format, over its time; `of_read` is the same as a share of what a plain
read of as many bytes by as many threads reaches, before and after. `torch_ms`: the torch path of
the same model in bf16. All of them are the fastest of several, in turns: other programs only make
them slower.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import Rows, bench_parser, numbers, report, say
from bench.cpu_limits import ReadProbe
from bench.shapes import MOE_SHAPES, write_config
from bench.speculation.draft_step import (
    FORMATS,
    Work,
    block_tables,
    blocks_for,
    make_cache,
    make_executor,
    random_model,
    step_arrays,
    torch_step,
)
from hetero_llm.cpu.executor import Executor
from hetero_llm.cpu.fused import speed_up
from hetero_llm.models.configs.mixture import MixtralConfig, Qwen2MoeConfig
from hetero_llm.models.experts import TopKRouter
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.attention import TorchPagedAttention

_LITTLE = {
    "vocab_size": 512,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
_CONTEXT = 16
_TORCH_STEPS = 3


def make_config(shape: str, layers: int) -> MixtralConfig:
    """The shape's experts in `layers` layers, and little else."""
    changed = {**MOE_SHAPES[shape], **_LITTLE, "num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        config = load_model_config(write_config(changed, Path(folder)))
    assert isinstance(config, MixtralConfig)
    return config


def step_bytes(config: MixtralConfig, experts: float, weight_bytes: float) -> float:
    """Bytes of weights that a step reads.

    Args:
        experts: that its tokens choose in a layer.
        weight_bytes: of a weight in a layer's matrices; routers and the head have bf16.
    """
    hidden, shared = config.hidden_size, 0
    if isinstance(config, Qwen2MoeConfig):
        shared = config.shared_expert_size
    attention = 4 * hidden * config.num_heads * config.head_dim
    inner = experts * config.expert_size + shared
    matrices = (attention + 3 * hidden * inner) * weight_bytes
    routers = 2 * hidden * config.num_experts
    return config.num_layers * (matrices + routers) + 2 * hidden * config.vocab_size


class Bench:
    """A cache for steps of up to `rows` tokens, and the torch path's figures."""

    def __init__(self, config: MixtralConfig, rows: list[int]) -> None:
        self.config = config
        self.num_blocks = blocks_for(rows, _CONTEXT)
        self.cache = make_cache(config, self.num_blocks)

    def by_torch(self, works: list[Work]) -> tuple[dict[int, float], dict[int, float]]:
        """Milliseconds of a step, and experts of a layer, by rows."""
        model = random_model(self.config)
        speed_up(model)
        attention = TorchPagedAttention(self.config, self.cache, row_by_row=False)
        chosen: list[int] = []
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            router.register_forward_hook(lambda _, __, out: chosen.append(len(out[0].unique())))
        times, experts = {}, {}
        for work in works:
            step = torch_step(model, attention, work, self.num_blocks)
            chosen.clear()
            step()  # the first one has the tokens of the executor's steps
            experts[work.rows] = float(np.mean(chosen))
            times[work.rows] = fastest(step, _TORCH_STEPS)
        return times, experts

    def executor(self, weight_format: str, threads: int) -> Executor:
        """Of the same random weights: its tokens choose the same experts, but for rounding."""
        return make_executor(self.config, self.cache, weight_format, threads)


def fastest(step: Callable[[], Any], count: int = 1, seconds: float = 0.0) -> float:
    """Milliseconds of the fastest of `count` steps, or of as many as `seconds` have room for."""
    best, begin, done = float("inf"), time.perf_counter(), 0
    while done < count or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        step()
        best, done = min(best, time.perf_counter() - start), done + 1
    return best * 1e3


def measure(
    bench: Bench,
    works: list[Work],
    formats: list[str],
    threads: int,
    *,
    rounds: int = 4,
    round_s: float = 0.4,
) -> Rows:
    """One row per format and number of tokens.

    Args:
        rounds: in which steps and plain reads take turns.
        round_s: seconds of steps in a round; at least three steps.
    """
    torch.set_num_threads(threads)
    torch_ms, experts = bench.by_torch(works)
    table = []
    for weight_format in formats:
        executor = bench.executor(weight_format, threads)
        for work in works:
            size = step_bytes(bench.config, experts[work.rows], FORMATS[weight_format])
            arrays = step_arrays(work, block_tables(work, bench.num_blocks))
            step = partial(executor.step, *arrays)  # always the same tokens
            with ReadProbe(int(size), threads) as probe:
                step()
                ours, read = [], []
                for _ in range(rounds):
                    ours.append(fastest(step, 3, round_s))
                    read.append(probe.seconds(2) * 1e3)
            rate = size / min(ours) / 1e6
            table.append(
                {"weights": weight_format, "threads": threads, "rows": work.rows,
                 "experts": experts[work.rows], "ours_ms": min(ours), "gb_s": rate,
                 "read_gb_s": size / min(read) / 1e6, "of_read": min(read) / min(ours),
                 "torch_ms": torch_ms[work.rows], "torch/ours": torch_ms[work.rows] / min(ours)}
            )  # fmt: skip
            say(table[-1])
        del executor, step  # frees memory, and the cores of its threads
    return table


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(MOE_SHAPES), default="qwen1.5-moe-a2.7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 64], help="comma-separated")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    args = parser.parse_args()
    config = make_config(args.shape, args.layers)
    works = [Work("batch", rows, _CONTEXT) for rows in args.rows]
    table = measure(Bench(config, args.rows), works, args.formats, args.threads)
    report("cpu_experts", {"shape": args.shape, "layers": args.layers}, table, args.out)


if __name__ == "__main__":
    main()
