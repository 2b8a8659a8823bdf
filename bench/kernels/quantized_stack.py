"""Products of few rows with 8-bit weights where a step has them: norms and gates lie between.

`bench.kernels.quantized_gemm` times each product behind its like. In a step a product starts while
a norm or gate runs, so what it can do before its inputs are there costs nothing: with the layers of
Llama-3.1-8B, one after the other, in one CUDA graph, this is seen. Attention is a norm here.
Each launch of one layer's product is timed with the others' as the engine has them, first
tiles and splits of K, then for the fastest of these how the sums of splits come together (`waits`)
and how much is prefetched into L2 before the wait; last all that was found is timed together,
beside the engine's, by turns. "empty": the chain without the products.

Predictions, before anything was measured. The products alone took 2.21 ms at 8 rows and 2.65 at 32,
so a chain should take some 2.5 and 3.0. What the SASS of the kernels says:

- Behind the wait come some 85 instructions of addresses, then the first weights: 1.2 us in all.
- Scales of rows were asked for behind the loop, 0.7 us from DRAM. Now that is before the wait: 90
  us less in a step (32 x 4 x 0.7) of any number of rows, one included.
- Split K ends with a fence, an atomic add and another read, 2 us, of which `waits` leaves 1: 60 to
  100 us less for three products a layer.
- A norm takes 2 us, in which DRAM could bring 8 MB into L2, half of `o` or a third of `qkv`: with
  prefetching up to 1 us less for each product, 130 us in a step. More than 1,024 columns do not
  help, as the window is over.

| rows | as the engine | `waits` | and prefetching |
|---|---|---|---|
| 8 | 2.45 ms | 2.38 | 2.28 |
| 32 | 2.90 | 2.82 | 2.72 |
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import bench_parser, names_of, numbers, print_table, write_results
from bench.gpu_timing import graph_ms
from bench.kernels.quantized_gemm import FORMS, LAYERS, random_matrix, say
from bench.kernels.skinny_gemm import MODELS, compile_all, label, rows_like
from hetero_llm.gpu.kernels.activation import silu_mul
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.launch import Launch
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, choose, fits, plan_launch
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig

DIMS = MODELS["llama-3.1-8b"]
ROUNDS = 31
KEPT = 3  # tiles and splits of which waits and prefetching are tried
WORST = 1e-2
SHARED = 200 << 10

# Features, columns, stages and warps of a program.
FEW = (
    (16, 256, 4, 1), (16, 512, 3, 1), (32, 128, 6, 2), (32, 256, 3, 2), (32, 256, 4, 2),
    (32, 256, 6, 2), (32, 512, 2, 2), (32, 512, 3, 2), (64, 256, 3, 4), (64, 256, 4, 4),
    (64, 512, 2, 4), (64, 512, 3, 4), (128, 256, 3, 8),
)  # fmt: skip
MORE = (
    (32, 256, 2, 2), (32, 256, 3, 2), (64, 128, 4, 4), (64, 256, 2, 4), (64, 256, 3, 4),
    (128, 128, 3, 8), (128, 256, 2, 8), (128, 256, 3, 8), (128, 256, 4, 8), (128, 128, 4, 4),
)  # fmt: skip


class Stack:
    """The chain at one number of rows."""

    def __init__(self, layers: list[dict[str, PreparedMatrix]], m: int) -> None:
        self.layers, self.m = layers, m
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name in LAYERS:
            self.inputs[name], self.outputs[name] = rows_like(DIMS.shapes()[name], m)
        self.norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
        self.exact = {
            name: F.linear(self.inputs[name].float(), dequantize_to(matrix, _float_like(matrix)))
            for name, matrix in layers[0].items()
        }

    def launches(self, name: str, config: SkinnyConfig) -> list[Launch]:
        x, y = self.inputs[name], self.outputs[name]
        return [plan_launch(x, layer[name], None, y=y, config=config) for layer in self.layers]

    def milliseconds(self, plan: dict[str, list[Launch]]) -> float:
        return graph_ms(lambda: self.run(plan), replays=5)

    def run(self, plan: dict[str, list[Launch]]) -> None:
        """Products take and leave what is in their buffers; what lies between takes as long as it
        would with them."""
        x, outputs = self.inputs["qkv"], self.outputs
        residual = torch.zeros_like(x)
        for layer in range(len(self.layers)):
            add_rms_norm(x, residual, self.norm, 1e-5)
            _launch(plan, "qkv", layer)
            add_rms_norm(outputs["down"], residual, self.norm, 1e-5)
            _launch(plan, "o", layer)
            add_rms_norm(outputs["o"], residual, self.norm, 1e-5)
            _launch(plan, "gate_up", layer)
            silu_mul(outputs["gate_up"])
            _launch(plan, "down", layer)

    def error(self, name: str, launches: list[Launch]) -> float:
        """Of the first layer's product, over its largest value, run twice."""
        exact, y = self.exact[name], self.outputs[name]
        worst = 0.0
        for _ in range(2):
            y.zero_()
            launches[0]()
            worst = max(worst, ((y.float() - exact).abs().max() / exact.abs().max()).item())
        return worst


def _float_like(matrix: PreparedMatrix) -> Tensor:
    return torch.empty(matrix.shape, device="cuda")


def _launch(plan: dict[str, list[Launch]], name: str, layer: int) -> None:
    if plan:
        plan[name][layer]()


def in_memory(config: SkinnyConfig) -> bool:
    """Whether the pipeline fits a multiprocessor."""
    if config.block_m == 1:
        return True
    stage = config.block_k * (config.block_n + 2 * config.block_m)
    return stage * config.num_stages <= SHARED


def tilings(m: int, matrix: PreparedMatrix) -> list[SkinnyConfig]:
    """Tiles and splits worth timing, what `choose` says first."""
    configs = [choose(m, matrix)]
    if m == 1:
        for block_n, warps in ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)):
            configs.append(SkinnyConfig(1, block_n, 256 * matrix.parts * warps, num_warps=warps))
    else:
        block_m = next(size for size in (8, 16, 32, 64) if m <= size)
        for block_n, block_k, stages, warps in FEW if block_m <= 16 else MORE:
            tiles = matrix.shape[0] // block_n
            for split in (1, 2, 4, 8):
                if 120 <= tiles * split <= 1300 and tiles * split * warps <= 132 * 24:
                    configs.append(SkinnyConfig(block_m, block_n, block_k, split, warps, stages))
    return [c for c in dict.fromkeys(configs) if fits(c, m, matrix) and in_memory(c)]


def variants(m: int, config: SkinnyConfig, matrix: PreparedMatrix) -> list[SkinnyConfig]:
    """The same tiles with sums that are waited for, and with prefetching."""
    found = []
    for waits in (False, True) if config.split_k > 1 else (False,):
        for prefetch in (0, 256, 512, 1024, 2048) if m > 1 else (0,):
            found.append(dataclasses.replace(config, waits=waits, prefetch=prefetch))
    return [c for c in found if fits(c, m, matrix)]


class Tuning:
    """Times launches of one product in a chain with the others as they are."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.matrices = stack.layers[0]
        self.chosen = {name: choose(stack.m, matrix) for name, matrix in self.matrices.items()}
        self.plan = {name: stack.launches(name, config) for name, config in self.chosen.items()}
        compile_all([launches[0] for launches in self.plan.values()])
        self.worst = 0.0

    def times(self, name: str, configs: Iterable[SkinnyConfig]) -> dict[SkinnyConfig, float]:
        """Milliseconds of the chain with each."""
        plans = {config: self.stack.launches(name, config) for config in configs}
        compile_all([launches[0] for launches in plans.values()])
        found = {}
        for config, launches in plans.items():
            try:
                error = self.stack.error(name, launches)
            except Exception as failure:  # too much shared memory: not one of the candidates then
                print(f"  {label_of(config)}: {failure}", flush=True)
                continue
            self.worst = max(self.worst, error)
            found[config] = self.stack.milliseconds({**self.plan, name: launches})
        return found

    def best_of(self, name: str) -> tuple[SkinnyConfig, dict[SkinnyConfig, float]]:
        m, matrix = self.stack.m, self.matrices[name]
        times = self.times(name, tilings(m, matrix))
        kept = sorted(times, key=lambda config: times[config])[:KEPT]
        kept += [self.chosen[name]] if self.chosen[name] not in kept else []
        more = dict.fromkeys(v for config in kept for v in variants(m, config, matrix))
        times |= self.times(name, more)
        return min(times, key=lambda config: times[config]), times


def label_of(config: SkinnyConfig) -> str:
    return label(config) + (" waits" if config.waits else "")


def by_turns(bodies: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median milliseconds of graphs that are replayed by turns."""
    graphs = {}
    for name, body in bodies.items():
        body()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            body()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--kind", choices=("fp8", "fp8_block", "int8"), default="fp8")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32])
    parser.add_argument("--layers", type=names_of(LAYERS), default=list(LAYERS))
    parser.add_argument("--all", type=int, default=6, help="launches of each product to print")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    torch.manual_seed(0)
    shapes = DIMS.shapes()
    layers = [
        {name: random_matrix(FORMS[args.kind], *shapes[name]) for name in LAYERS}
        for _ in range(DIMS.layers)
    ]
    steps: list[dict[str, Any]] = []
    launches: list[dict[str, Any]] = []
    worst = 0.0
    for m in args.rows:
        stack = Stack(layers, m)
        tuning = Tuning(stack)
        best = dict(tuning.plan)
        for name in args.layers:
            config, times = tuning.best_of(name)
            best[name] = stack.launches(name, config)
            ranked = sorted(times, key=lambda c: times[c])
            shown = dict.fromkeys([*ranked[: args.all], tuning.chosen[name]])
            for c in ranked:
                row = {"rows": m, "layer": name, "chain_ms": times[c], "config": label_of(c)}
                launches.append(row)
                if c in shown:
                    say({**row, "chosen": "chosen" if c == tuning.chosen[name] else ""})
        worst = max(worst, tuning.worst)
        bodies: dict[str, Callable[[], None]] = {
            "empty": lambda: stack.run({}),  # noqa: B023
            "engine": lambda: stack.run(tuning.plan),  # noqa: B023
            "best": lambda: stack.run(best),  # noqa: B023
        }
        steps.append({"rows": m, **{f"{k}_ms": v for k, v in by_turns(bodies).items()}})
        print_table(steps[-1:])
    print_table(steps)
    results = {"kind": args.kind, "steps": steps, "launches": launches, "worst_error": worst}
    write_results("kernels_quantized_stack", results, args.out)
    if not worst < WORST:
        raise SystemExit(f"a kernel is wrong by {worst:.2g}")


if __name__ == "__main__":
    main()
