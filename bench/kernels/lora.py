"""Low-rank adapters in the products of a step, by number of rows, on the device.

The layers of Llama-3.1-8B one after the other, without attention: norm, queries, keys and values,
output projection, norm, gate and up, gated activation, down. "base" has no adapters; an arm is the
time over it with adapters of rank 16 in all products. "inside": the products add them (what the
engine does up to 64 rows); "outside": two kernels around each product (what it does with more).
"none": no row has an adapter, which the engine runs as "base"; "one" adapter for all rows;
"eight" by turns; "mixed": eight, and every second row has none. All is timed in CUDA graphs, and
`ms` is what all layers take. Results of both ways are compared first.

`--what prompts`: rows of whole prompts, with adapters by the ways of adding them, over the plain
layers. "behind": the expands add to a product's output; "before": they write it, and the library's
product adds to that; "gate": as before, but gate and up get theirs in the activation.

`--what experts`: the experts of Qwen3-30B-A3B (128 of 2048 x 768, 8 a row) with an adapter each,
over the same without, by number of rows and adapters; `difference` from the float32 reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import Rows, bench_parser, names_of, numbers, print_table, write_results
from bench.gpu_timing import graph_ms, largest_error, need_cuda
from bench.kernels.skinny_gemm import MODELS
from hetero_llm.gpu.kernels.activation import silu_mul
from hetero_llm.gpu.kernels.expert_adapters import (
    ExpertAdapters,
    ExpertKernels,
    adapted_experts_reference,
)
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots
from hetero_llm.gpu.kernels.lora_product import (
    StepRows,
    product_before_gate,
    product_with_adapters,
    sums_of_product,
)
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.skinny_gemm import linear

WHAT = ("steps", "prompts", "experts")
ROWS = (1, 8, 32)
PROMPTS = (512, 2048, 4096)
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


def run_layers(
    layers: list[Layer], start: Tensor, norm: Tensor, arm: Arm | None, way: str = "before"
) -> Tensor:
    """[M, hidden] after all layers; `arm` None: no adapters; `way` of `WAYS`."""
    rows = None
    if arm is not None:
        rows = StepRows(arm.numbers, arm.slots, num_slots=SLOTS, words=arm.words)
    # Adapters go behind a product that is not known to be the library's.
    product = F.linear if way == "behind" else linear

    def multiply(layer: Layer, name: str, x: Tensor) -> Tensor:
        weight, adapters = layer[name]
        if rows is None:
            return linear(x, weight)
        return product_with_adapters(product, x, weight, None, rows=rows, weights=adapters)

    def gates(layer: Layer, x: Tensor) -> Tensor:
        if rows is None or way != "gate":
            return silu_mul(multiply(layer, "gate_up", x))
        weight, own = layer["gate_up"]
        y, missing = product_before_gate(linear, x, weight, None, rows=rows, weights=own)
        return silu_mul(y) if missing is None else missing.gate(y, "silu")

    x, residual = start, torch.zeros_like(start)
    for layer in layers:
        x, residual = add_rms_norm(x, residual, norm, 1e-5)
        heads = multiply(layer, "qkv", x)[:, : DIMS.hidden]
        x, residual = add_rms_norm(multiply(layer, "o", heads), residual, norm, 1e-5)
        x = multiply(layer, "down", gates(layer, x))
    return add_rms_norm(x, residual, norm, 1e-5)[0]


def difference(layers: list[Layer], start: Tensor, norm: Tensor, arms: tuple[Arm, Arm]) -> float:
    """Largest difference of two ways in one layer, over its largest result."""
    return largest_error(*(run_layers(layers[:1], start, norm, arm) for arm in arms))


def steps(rank: int, counts: list[int]) -> tuple[Rows, float]:
    """Both ways of adding adapters; figures and the largest difference."""
    layers = [random_layer(rank) for _ in range(DIMS.layers)]
    norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    rows: Rows = []
    worst = 0.0
    for count in counts:
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
    return rows, worst


# --- many rows ---

WAYS = ("behind", "before", "gate")
FEW_LAYERS = 4


def prompts(rank: int, counts: list[int]) -> Rows:
    """Layers by way, over the same without adapters; `difference` from "behind"."""
    layers = [random_layer(rank) for _ in range(FEW_LAYERS)]
    norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    rows: Rows = []
    for count in counts:
        start = torch.randn(count, DIMS.hidden, device="cuda", dtype=torch.bfloat16)
        for arm in ("eight", "one"):
            slots = Arm.of(ARMS[arm](count), 0)
            plain = partial(run_layers, layers, start, norm, None)
            # The base before and behind: clocks of a device that is busy for long change.
            base = [graph_ms(plain)]
            taken = [graph_ms(partial(run_layers, layers, start, norm, slots, w)) for w in WAYS]
            base.append(graph_ms(plain))
            mean = sum(base) / 2
            first, *others = (run_layers(layers[:1], start, norm, slots, way) for way in WAYS)
            rows.append(
                {"rows": count, "arm": arm, "base_us": mean / FEW_LAYERS * 1e3,
                 "again": base[1] / base[0],
                 **{way: ms / mean for way, ms in zip(WAYS, taken, strict=True)},
                 "difference": max(largest_error(other, first) for other in others)}
            )  # fmt: skip
    return rows


# --- experts ---

EXPERTS, EXPERTS_OF_ROW, EXPERT_HIDDEN, EXPERT_INNER = 128, 8, 2048, 768
EXPERT_ROWS = (1, 8, 32, 4096)


def expert_slots(rank: int, columns: int, features: tuple[int, ...]) -> LoraSlots:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    one = LoraSlots.empty(1, rank, columns, features, like)
    sizes = SLOTS, EXPERTS
    a = torch.empty(*sizes, *one.a.shape[1:], dtype=like.dtype, device="cuda")
    b = torch.empty(*sizes, *one.b.shape[1:], dtype=like.dtype, device="cuda")
    scales = torch.ones(*sizes, one.scales.shape[1], device="cuda")
    a.normal_(std=columns**-0.5)
    b.normal_(std=rank**-0.5)
    return replace(one, a=a, b=b, scales=scales, experts=EXPERTS)


def experts_with_adapters(rank: int, counts: tuple[int, ...]) -> Rows:
    sizes = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = torch.empty(EXPERTS, 2 * EXPERT_INNER, EXPERT_HIDDEN, **sizes)  # type: ignore[call-overload]
    down = torch.empty(EXPERTS, EXPERT_HIDDEN, EXPERT_INNER, **sizes)  # type: ignore[call-overload]
    gate_up.normal_(std=EXPERT_HIDDEN**-0.5)
    down.normal_(std=EXPERT_INNER**-0.5)
    first = expert_slots(rank, EXPERT_HIDDEN, (EXPERT_INNER, EXPERT_INNER))
    second = expert_slots(rank, EXPERT_INNER, (EXPERT_HIDDEN,))
    kernels = ExpertKernels("silu", None)
    rows: Rows = []
    for count in counts:
        x = torch.randn(count, EXPERT_HIDDEN, **sizes)  # type: ignore[call-overload]
        chosen = torch.rand(count, EXPERTS, device="cuda").topk(EXPERTS_OF_ROW)
        weights, ids = chosen.values.contiguous(), chosen.indices.int().contiguous()
        call = (x, ids, weights, gate_up, down)
        base = graph_ms(lambda call=call: kernels(*call))
        for arm in ("one", "eight"):
            slots = torch.tensor(ARMS[arm](count), dtype=torch.int32, device="cuda")
            own = ExpertAdapters(slots, first, second)
            taken = graph_ms(lambda call=call, own=own: kernels.adapted(*call, adapters=own))
            wanted = adapted_experts_reference(*call, activation="silu", biases=None, adapters=own)
            apart = largest_error(kernels.adapted(*call, adapters=own), wanted)
            rows.append(
                {"rows": count, "arm": arm, "base_us": base * 1e3, "adapters": taken / base,
                 "difference": apart}
            )  # fmt: skip
    return rows


@torch.inference_mode()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--what", type=names_of(WHAT), default=["steps"], help=", ".join(WHAT))
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of `steps`")
    parser.add_argument("--prompts", type=numbers, default=PROMPTS, help="rows of `prompts`")
    args = parser.parse_args()
    need_cuda()
    results: dict[str, Any] = {"rank": args.rank, "slots": SLOTS}
    worst = 0.0
    for what in args.what:
        if what == "steps":
            results["rows"], worst = steps(args.rank, args.rows)
            results["worst_difference"] = worst
            print_table(results["rows"])
        elif what == "experts":
            results["experts"] = experts_with_adapters(args.rank, EXPERT_ROWS)
            print_table(results["experts"])
        else:
            results["prompts"] = prompts(args.rank, args.prompts)
            print_table(results["prompts"])
            worst = max(worst, *(row["difference"] for row in results["prompts"]))
    write_results("kernels_lora", results, args.out)
    if not worst < WORST:
        raise SystemExit(f"two ways differ by {worst:.2g}")


if __name__ == "__main__":
    main()
