"""Low-rank adapters beside the products that they ride on, by number of rows, on the device.

One layer of Llama-3.1-8B after the other, its four products in a chain: alone ("base"), with the
two kernels of the adapters around each product and no row that has one ("none"), one adapter for
all rows ("one"), and eight by turns ("eight"). All is timed in CUDA graphs over as many layers as
the model has; `ms` is what all of them take in a step.

Predictions, before anything was measured. Rank 16 in all products: A and B of an adapter are
1.31e6 numbers a layer, 84 MB in all, 20 us at 4.2 TB/s; of eight 160 us. Each launch adds what the
overlap with its neighbours leaves, say 1.2 us: 256 launches, 0.31 ms. So over a base of 3.6 ms at
one row: "none" +8%, "one" +9%, "eight" at 8 rows +13%. What launches cost goes when the shrink
rides in the product's grid and the expand in the next pointwise kernel; what is left then is the
bytes, +0.6% and +4%. Prompts of 4096 rows: outputs are read and written once more, 43,008 numbers a
row and layer, 0.70 GB or 0.17 ms beside 2.9 ms of products: +6%.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common import bench_parser, print_table, write_results
from bench.gpu_timing import graph_ms
from bench.kernels.skinny_gemm import MODELS
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots, lora_expand, lora_shrink
from hetero_llm.gpu.kernels.skinny_gemm import linear

ROWS = (1, 8, 32, 64, 512, 4096)
SLOTS = 8
KV_FEATURES = 1024
ARMS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda rows: [NO_SLOT] * rows,
    "one": lambda rows: [3] * rows,
    "eight": lambda rows: [row * SLOTS // rows if rows >= SLOTS else row for row in range(rows)],
}
"""Slots of the rows; rows of one adapter follow one another."""

Layer = list[tuple[Tensor, LoraSlots]]


def random_layer(rank: int) -> Layer:
    """Weights and adapters of the four products of one layer."""
    dims = MODELS["llama-3.1-8b"]
    found = []
    for name, (features, columns) in dims.shapes().items():
        if name == "head":
            continue
        parts = {
            "qkv": (dims.qkv - 2 * KV_FEATURES, KV_FEATURES, KV_FEATURES),
            "gate_up": (dims.inner, dims.inner),
        }.get(name, (features,))
        like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        slots = LoraSlots.empty(SLOTS, rank, columns, parts, like)
        slots.a.normal_(std=columns**-0.5)
        slots.b.normal_()
        slots.scales.fill_(1.0)
        weight = torch.randn(features, columns, device="cuda", dtype=torch.bfloat16)
        found.append((weight, slots))
    return found


def run_layer(layer: Layer, inputs: dict[int, Tensor], where: Tensor | None) -> None:
    """`where`: slots of the rows; None: no adapters at all."""
    for weight, slots in layer:
        x = inputs[weight.shape[1]]
        if where is None:
            linear(x, weight)
            continue
        u = lora_shrink(x, where, slots)
        lora_expand(linear(x, weight), u, where, slots)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    num_layers = MODELS["llama-3.1-8b"].layers
    layers = [random_layer(args.rank) for _ in range(num_layers)]
    rows: list[dict[str, Any]] = []
    for count in ROWS:
        inputs = {
            columns: torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
            for columns in {weight.shape[1] for weight, _ in layers[0]}
        }

        def step(where: Tensor | None, inputs: dict[int, Tensor] = inputs) -> None:
            for layer in layers:
                run_layer(layer, inputs, where)

        base = graph_ms(lambda: step(None))
        row: dict[str, Any] = {"rows": count, "base_ms": base}
        for arm, slots_of in ARMS.items():
            where = torch.tensor(slots_of(count), dtype=torch.int32, device="cuda")
            row[arm] = graph_ms(partial(step, where)) / base
        rows.append(row)
    print_table(rows)
    write_results("kernels_lora", {"rank": args.rank, "slots": SLOTS, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
