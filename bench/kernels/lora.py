"""Low-rank adapters in the products of a step, by number of rows, on the device.

The layers of Llama-3.1-8B one after the other, without attention: norm, queries, keys and values,
output projection, norm, gate and up, gated activation, down. "base" has no adapters; an arm is the
time over it with adapters of rank 16 in all products. "inside": the products add them (what the
engine does up to 64 rows); "outside": two kernels around each product (what it does with more).
"none": no row has an adapter, which the engine runs as "base"; "one" adapter for all rows;
"eight" by turns; "mixed": eight, and every second row has none. All is timed in CUDA graphs, and
`ms` is what all layers take. Results of both ways are compared first.

Predictions, before anything of "inside" was measured. A and B of an adapter are 1.31e6 numbers a
layer, 84 MB in all: 20 us at 4.2 TB/s, of eight 160 us. Outside, each of 256 launches adds at least
1.2 us: 0.31 ms. Inside there is one launch more in a step, and at the end of a product one read of
sums from L2 and a small product, say 0.3 us at one row (where 24 to 56 small programs in 800 to
3600 make the sums long before), and of several rows 1 us in `o` and `down` (whose 132 programs are
all of one length, those that make the sums included) and 0.5 us in the others. The engine's steps
take 3.94, 4.45 and 4.79 ms at 1, 8 and 32 rows:

| rows | arm | inside | outside |
|---|---|---|---|
| 1 | one | 20 + 38 us, +1.5% | 20 + 307 us, +8% |
| 8 | one | 20 + 96 us, +2.6% | +7% |
| 8 | eight | 160 + 96 us, +5.8% | +10% |
| 32 | eight | 160 + 96 us, and 32 x 1 us since `qkv` is not the library's: +6% | +10% |

Prompts of 4096 rows, outside: outputs are read and written once more, 43,008 numbers a row and
layer, 0.70 GB or 0.17 ms beside 2.9 ms of products: +6%.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import bench_parser, numbers, print_table, write_results
from bench.gpu_timing import graph_ms
from bench.kernels.skinny_gemm import MODELS
from hetero_llm.gpu.kernels.activation import silu_mul
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots
from hetero_llm.gpu.kernels.lora_product import StepRows, product_with_adapters, sums_of_product
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.skinny_gemm import linear

ROWS = (1, 8, 32)
SLOTS = 8
KV_FEATURES = 1024
DIMS = MODELS["llama-3.1-8b"]
WORST = 3e-2  # largest difference of the two ways, over the largest result


def by_turns(rows: int) -> list[int]:
    """Rows of one adapter follow one another."""
    return [row * SLOTS // rows if rows >= SLOTS else row for row in range(rows)]


ARMS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda rows: [NO_SLOT] * rows,
    "one": lambda rows: [3] * rows,
    "eight": by_turns,
    "mixed": lambda rows: [NO_SLOT if row % 2 else s for row, s in enumerate(by_turns(rows))],
}
"""Slots of the rows."""


class Projection(NamedTuple):
    """Weights and adapters of one product."""

    weight: Tensor
    adapters: LoraSlots


Layer = dict[str, Projection]


class Arm(NamedTuple):
    """Numbers and slots of the rows, [M] int32 each; words of sums, 0: adapters are outside."""

    numbers: Tensor
    slots: Tensor
    words: int

    @staticmethod
    def of(slots: list[int], words: int) -> Arm:
        every = [
            torch.tensor(values, dtype=torch.int32, device="cuda")
            for values in (range(len(slots)), slots)
        ]
        return Arm(*every, words)


def random_layer(rank: int) -> Layer:
    found = {}
    for name, (features, columns) in DIMS.shapes().items():
        if name == "head":
            continue
        parts = {
            "qkv": (DIMS.qkv - 2 * KV_FEATURES, KV_FEATURES, KV_FEATURES),
            "gate_up": (DIMS.inner, DIMS.inner),
        }.get(name, (features,))
        like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        slots = LoraSlots.empty(SLOTS, rank, columns, parts, like)
        slots.a.normal_(std=columns**-0.5)
        slots.b.normal_(std=rank**-0.5)
        slots.scales.fill_(1.0)
        weight = torch.empty(features, columns, device="cuda", dtype=torch.bfloat16)
        found[name] = Projection(weight.normal_(std=columns**-0.5), slots)
    return found


def run_layers(layers: list[Layer], start: Tensor, norm: Tensor, arm: Arm | None) -> Tensor:
    """[M, hidden] after all layers; `arm` None: no adapters."""
    rows = None
    if arm is not None:
        rows = StepRows(arm.numbers, arm.slots, num_slots=SLOTS, words=arm.words)

    def multiply(layer: Layer, name: str, x: Tensor) -> Tensor:
        weight, adapters = layer[name]
        if rows is None:
            return linear(x, weight)
        return product_with_adapters(linear, x, weight, None, rows=rows, weights=adapters)

    x, residual = start, torch.zeros_like(start)
    for layer in layers:
        x, residual = add_rms_norm(x, residual, norm, 1e-5)
        heads = multiply(layer, "qkv", x)[:, : DIMS.hidden]
        x, residual = add_rms_norm(multiply(layer, "o", heads), residual, norm, 1e-5)
        x = multiply(layer, "down", silu_mul(multiply(layer, "gate_up", x)))
    return add_rms_norm(x, residual, norm, 1e-5)[0]


def difference(layers: list[Layer], start: Tensor, norm: Tensor, arms: tuple[Arm, Arm]) -> float:
    """Largest difference of two ways in one layer, over its largest result."""
    one, other = (run_layers(layers[:1], start, norm, arm).float() for arm in arms)
    return ((one - other).abs().max() / other.abs().max()).item()


@torch.inference_mode()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=numbers, default=ROWS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    layers = [random_layer(args.rank) for _ in range(DIMS.layers)]
    norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for count in args.rows:
        start = torch.randn(count, DIMS.hidden, device="cuda", dtype=torch.bfloat16)
        words = sum(
            sums_of_product(linear, count, one.adapters)
            for layer in layers
            for one in layer.values()
        )
        base = graph_ms(partial(run_layers, layers, start, norm, None))
        for arm, slots_of in ARMS.items():
            ways = Arm.of(slots_of(count), words), Arm.of(slots_of(count), 0)
            inside, outside = (
                graph_ms(partial(run_layers, layers, start, norm, way)) / base for way in ways
            )
            apart = difference(layers, start, norm, ways)
            worst = max(worst, apart)
            rows.append(
                {"rows": count, "arm": arm, "base_ms": base, "inside": inside if words else None,
                 "outside": outside, "difference": apart}
            )  # fmt: skip
        # The base once more: how far the figures of one number of rows can be compared.
        again = graph_ms(partial(run_layers, layers, start, norm, None))
        rows.append({**rows[-1], "arm": "base", "inside": again / base, "outside": again / base})
    print_table(rows)
    results = {"rank": args.rank, "slots": SLOTS, "rows": rows, "worst_difference": worst}
    write_results("kernels_lora", results, args.out)
    if not worst < WORST:
        raise SystemExit(f"the two ways differ by {worst:.2g}")


if __name__ == "__main__":
    main()
