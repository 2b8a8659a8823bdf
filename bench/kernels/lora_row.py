"""Low-rank adapters in the products of one row: how the programs that multiply with A are cut.

The layers of Llama-3.1-8B one after the other, without attention, as in `bench.kernels.lora`, with
adapters of rank 16 inside of all products. "none": no row has an adapter, so what is left is due to
the kernels alone; "one": the row has one. Each plan is a number of lines of A and of tiles of K in
a program, and how many registers a thread may take; the first one is what the engine does. All
plans are graphs that are replayed by turns; a figure is the median of its time over that of "base",
the products without adapters, in the same round.

Predictions. Before this file, "none" took 1.027 and "one" 1.037 of 3.42 ms: 92 and 127 us in 128
products. In the SASS of these kernels a program read the row's slot behind the wait for the kernel
before, waited for it, since B's address depends on it, and asked for the row of inputs only then:
one latency of L2, 0.3 us, at the begin of each product; and at its end stood, one after the other,
a count of missing sums, the sum of shares and the product with B, each with shuffles and up to 11
barriers in all: 0.3 us.
Both are gone: the slot is read before the wait, and what a thread multiplies with B goes into the
sum that the product has anyway. Left are a launch (2 us), a hundred instructions a program, and the
bytes of A and B, 84 MB or 20 us:

| plan | none | one |
|---|---|---|
| as the engine | 1.004 | 1.012 |
| no limit of registers (`qkv` takes 79: 6 programs, not 7) | 1.006 | 1.015 |
| 4 lines | 1.004 | 1.012 |
| 2 lines, 1 tile | 1.005 | 1.013 |
| 1 line, 2 tiles | 1.006 | 1.015 |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import bench_parser, print_table, write_results
from bench.kernels.lora import DIMS, SLOTS, Layer, random_layer
from hetero_llm.gpu.kernels import skinny_gemm
from hetero_llm.gpu.kernels.activation import silu_mul
from hetero_llm.gpu.kernels.fused_lora import FusedAdapters, Shrinking, num_sums, row_slots
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots, lora_reference
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig, choose, plan_launch

ROUNDS = 41
WORST = 3e-2


class Plan(NamedTuple):
    """Lines of A and least tiles of K in a program; whether registers are limited."""

    lines: int = 2
    tiles: int = 2
    limited: bool = True


PLANS = (
    Plan(), Plan(limited=False), Plan(lines=4), Plan(tiles=1), Plan(lines=4, tiles=1),
    Plan(lines=1), Plan(tiles=4), Plan(lines=8, tiles=4),
)  # fmt: skip


class Row:
    """All layers over one row, with the adapters of one plan; `plan` None: without."""

    def __init__(self, layers: list[Layer], plan: Plan | None, slot: int) -> None:
        self.layers, self.plan = layers, plan
        self.numbers = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.slots = torch.tensor([slot], dtype=torch.int32, device="cuda")
        self.words = sum(self.num_words(one.adapters) for layer in layers for one in layer.values())

    def shrinking(self, config: SkinnyConfig, m: int, weights: LoraSlots) -> Shrinking:
        assert self.plan is not None and m == 1
        return Shrinking.of_row(
            weights, config.num_warps, lines=self.plan.lines, least_tiles=self.plan.tiles
        )

    def num_words(self, weights: LoraSlots) -> int:
        if self.plan is None:
            return 0
        config = choose(1, weights.b.shape[1], weights.a.shape[2])
        assert config is not None
        return num_sums(1, weights, self.shrinking(config, 1, weights))

    def multiply(self, x: Tensor, weight: Tensor, adapters: FusedAdapters | None) -> Tensor:
        n, k = weight.shape
        config = choose(1, n, k)
        assert config is not None
        y = torch.empty(1, n, dtype=x.dtype, device=x.device)
        skinny_gemm.shrinking_programs = self.shrinking
        launch = plan_launch(x, weight, None, y=y, config=config, adapters=adapters)
        if self.plan is not None and not self.plan.limited:
            kept = {name: value for name, value in launch.options.items() if name != "maxnreg"}
            launch = replace(launch, options=kept)
        launch()
        return y

    def __call__(self, start: Tensor, norm: Tensor) -> Tensor:
        rows = taken = None
        if self.plan is not None:
            rows = row_slots(self.numbers, self.slots, num_slots=SLOTS, words=self.words)
            taken = 0

        def multiply(layer: Layer, name: str, x: Tensor) -> Tensor:
            nonlocal taken
            weight, weights = layer[name]
            adapters = None
            if rows is not None:
                begin, taken = taken, taken + self.num_words(weights)
                sums = rows.sums[begin:taken]
                adapters = FusedAdapters(weights, rows.slots, rows.distinct, sums)
            return self.multiply(x, weight, adapters)

        x, residual = start, torch.zeros_like(start)
        for layer in self.layers:
            x, residual = add_rms_norm(x, residual, norm, 1e-5)
            heads = multiply(layer, "qkv", x)[:, : DIMS.hidden]
            x, residual = add_rms_norm(multiply(layer, "o", heads), residual, norm, 1e-5)
            x = multiply(layer, "down", silu_mul(multiply(layer, "gate_up", x)))
        return add_rms_norm(x, residual, norm, 1e-5)[0]


def error_of(plan: Plan, layer: Layer) -> float:
    """Largest error of one layer's products over their largest value."""
    worst = 0.0
    for weight, weights in layer.values():
        row = Row([], plan, 3)
        x = torch.randn(1, weight.shape[1], device="cuda", dtype=weight.dtype)
        rows = row_slots(row.numbers, row.slots, num_slots=SLOTS, words=row.num_words(weights))
        y = row.multiply(x, weight, FusedAdapters(weights, *rows_of(rows)))
        exact = lora_reference(x.float() @ weight.float().t(), x, row.slots, weights)
        worst = max(worst, ((y.float() - exact).abs().max() / exact.abs().max()).item())
    return worst


def rows_of(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows.slots, rows.distinct, rows.sums


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def by_turns(graphs: dict[Any, torch.cuda.CUDAGraph]) -> dict[Any, list[float]]:
    """Milliseconds of each graph in each round; replays are queued so that none waits for us."""
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    for first in (True, False):  # the first round warms up
        rounds = []
        for _ in range(2 if first else ROUNDS):
            events = {}
            for name, graph in graphs.items():
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[name] = pair
            rounds.append(events)
        torch.cuda.synchronize()
        if not first:
            for events in rounds:
                for name, (begin, end) in events.items():
                    times[name].append(begin.elapsed_time(end))
    return times


@torch.inference_mode()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    layers = [random_layer(args.rank) for _ in range(DIMS.layers)]
    norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(1, DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    errors = {plan: error_of(plan, layers[0]) for plan in PLANS}
    arms: dict[Any, Row] = {"base": Row(layers, None, NO_SLOT)}
    for plan in PLANS:
        arms |= {(plan, "none"): Row(layers, plan, NO_SLOT), (plan, "one"): Row(layers, plan, 3)}
    graphs = {name: captured(partial(row, start, norm)) for name, row in arms.items()}
    times = by_turns(graphs)
    base = times.pop("base")

    def over_base(name: Any) -> float:
        return statistics.median(t / b for t, b in zip(times[name], base, strict=True))

    rows = [
        {**plan._asdict(), "none": over_base((plan, "none")), "one": over_base((plan, "one")),
         "error": errors[plan]}
        for plan in PLANS
    ]  # fmt: skip
    print(f"base: {statistics.median(base):.4f} ms")
    print_table(rows)
    results = {"rank": args.rank, "base_ms": statistics.median(base), "rows": rows}
    write_results("kernels_lora_row", results, args.out)
    if not max(errors.values()) < WORST:
        raise SystemExit("a kernel is wrong")


if __name__ == "__main__":
    main()
