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

Steps of many rows, `--what prompts`, `products` and `alone`. A first version took +15% at 4096
rows, 394 us a layer beside 2.67 ms. Predictions for what came after it, at 4.2 TB/s and 4096 rows:

| way | what it moves | us a layer |
|---|---|---|
| all | the shrinks read x: 3 x 34 and 117 MB | 52 |
| behind | expands read and write outputs: 352 MB twice | 168 |
| before | expands write, the library's product reads under its arithmetic | 84 |
| gate | before, but gate and up with the activation: 117 MB | 28 |

Seven to eight launches add 1 to 2 us each: behind +8.7%, before +5.5%, gate +3.5%.

- prompts: layers as above with rows of one and of eight adapters; "gate": gate and up get theirs in
  `lora_gate`. Also with other launches.
- products: one product with adapters beside the plain one; `accumulate`: the library's product that
  adds to its output; kernels of both are printed.
- alone: shrink, expand and gate by launch, inputs not in L2; GB/s are those of x, of outputs (twice
  where they are read), of both, beside those of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import bench_parser, names_of, numbers, print_table, write_results
from bench.gpu_timing import call_us, copy_bandwidth, graph_ms
from bench.kernels.skinny_gemm import MODELS
from hetero_llm.gpu.kernels import lora, lora_product
from hetero_llm.gpu.kernels.activation import silu_mul
from hetero_llm.gpu.kernels.lora import (
    NO_SLOT,
    ExpandConfig,
    LoraConfig,
    LoraSlots,
    ShrinkConfig,
    lora_expand,
    lora_shrink,
)
from hetero_llm.gpu.kernels.lora_gate import lora_gate
from hetero_llm.gpu.kernels.lora_product import (
    StepRows,
    group_rows,
    product_before_gate,
    product_with_adapters,
    sums_of_product,
)
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.models.layers import Product

Rows = list[dict[str, Any]]

WHAT = ("steps", "prompts", "products", "alone")
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
Launch = ShrinkConfig | ExpandConfig


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
    one, other = (run_layers(layers[:1], start, norm, arm).float() for arm in arms)
    return ((one - other).abs().max() / other.abs().max()).item()


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
COLD_BYTES = 256 << 20  # inputs and outputs take turns in so much memory: far more than L2 holds
SHRINKS = (
    ShrinkConfig(64, 128, num_stages=3, per_sm=1),
    ShrinkConfig(64, 128, num_stages=3, per_sm=2),
    ShrinkConfig(64, 128, num_stages=4, per_sm=1),
    ShrinkConfig(64, 64, num_stages=6, per_sm=2),
    ShrinkConfig(128, 64, num_stages=4, num_warps=4, per_sm=2),
    ShrinkConfig(128, 64, num_stages=4, num_warps=8, per_sm=2),
    ShrinkConfig(32, 128, num_stages=4, per_sm=3),
)
WRITES = (
    ExpandConfig(64, 128),
    ExpandConfig(64, 128, tiles=4),
    ExpandConfig(128, 128, tiles=4, num_warps=8),
    ExpandConfig(128, 64, tiles=8),
    ExpandConfig(64, 256, tiles=4, num_warps=8),
    ExpandConfig(32, 256, tiles=2),
)
ADDS = (*WRITES[:3], ExpandConfig(64, 128, tiles=4, num_stages=3))
GATES = (
    ExpandConfig(64, 64),
    ExpandConfig(64, 64, tiles=4),
    ExpandConfig(64, 64, tiles=7, num_stages=3),
    ExpandConfig(64, 128, tiles=4, num_warps=8),
    ExpandConfig(128, 64, tiles=4, num_warps=8),
    ExpandConfig(32, 128, tiles=4),
)
MANY = lora.choose(4096, lora.MIN_RANK, torch.bfloat16)
BLOCK = 128

LAUNCHES: dict[str, LoraConfig] = {
    "chosen": MANY,
    "ascending": replace(MANY, shrink=replace(MANY.shrink, descending=False)),
    "shrink 64x128 p1": replace(MANY, shrink=replace(MANY.shrink, per_sm=1, num_stages=4)),
    "shrink 128x64": replace(MANY, shrink=ShrinkConfig(128, 64, 8, 4, descending=True)),
    "write 128x128 t4 w8": replace(MANY, write=ExpandConfig(128, 128, tiles=4, num_warps=8)),
    "write 64x128 t1": replace(MANY, write=ExpandConfig(64, 128)),
}
"""For layers, way "gate"."""


@contextmanager
def launched(config: LoraConfig) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (lora, lora_product):
            stack.enter_context(mock.patch.object(module, "choose", lambda *_: config))
        yield


def prompts(rank: int, counts: list[int]) -> Rows:
    """Layers by way and launch, over the same without adapters; `difference` from "behind"."""
    layers = [random_layer(rank) for _ in range(FEW_LAYERS)]
    norm = torch.ones(DIMS.hidden, device="cuda", dtype=torch.bfloat16)
    rows: Rows = []
    for count in counts:
        start = torch.randn(count, DIMS.hidden, device="cuda", dtype=torch.bfloat16)
        for name, config, arm in (
            ("chosen", MANY, "eight"),
            *((name, config, "one") for name, config in LAUNCHES.items()),
        ):
            slots = Arm.of(ARMS[arm](count), 0)
            plain = partial(run_layers, layers, start, norm, None)
            ways = WAYS if name == "chosen" else WAYS[-1:]
            # The base before and behind: clocks of a device that is busy for long change.
            base = [graph_ms(plain)]
            with launched(config):
                taken = [graph_ms(partial(run_layers, layers, start, norm, slots, w)) for w in ways]
                first, *others = (
                    run_layers(layers[:1], start, norm, slots, way).float() for way in WAYS
                )
            base.append(graph_ms(plain))
            mean = sum(base) / 2
            apart = max((other - first).abs().max().item() for other in others)
            rows.append(
                {"rows": count, "launch": name, "arm": arm, "base_us": mean / FEW_LAYERS * 1e3,
                 "again": base[1] / base[0], **dict.fromkeys(WAYS),
                 **{way: ms / mean for way, ms in zip(ways, taken, strict=True)},
                 "difference": apart / first.abs().max().item()}
            )  # fmt: skip
    return rows


def kernel_names(call: Callable[[], object]) -> list[str]:
    """Of the kernels and copies of a call."""
    call()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


def by_turns_of(inputs: Sequence[Tensor], call: Callable[[Tensor], object]) -> Callable[[], object]:
    """A call with one input after the other."""
    source = cycle(inputs)
    return lambda: call(next(source))


def drawn(count: int, columns: int) -> Sequence[Tensor]:
    """Random rows, several times: together more than `COLD_BYTES`."""
    times = math.ceil(COLD_BYTES / (2 * count * columns)) + 1
    return torch.randn(times, count, columns, device="cuda", dtype=torch.bfloat16).unbind()


def product_row(name: str, one: Projection, count: int, *, names: bool) -> dict[str, Any]:
    """A product alone, plain and with adapters. `names`: prints those of its kernels."""
    weight, adapters = one
    arm = Arm.of(ARMS["one"](count), 0)
    rows = StepRows(arm.numbers, arm.slots, num_slots=SLOTS, words=0)
    inputs = drawn(count, weight.shape[1])
    rows.groups_for(inputs[0], adapters)  # once a step: not timed
    y = weight.new_zeros(count, len(weight))

    def with_adapters(product: Product, x: Tensor) -> Tensor:
        return product_with_adapters(product, x, weight, None, rows=rows, weights=adapters)

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda x: F.linear(x, weight),
        "accumulate": lambda x: y.addmm_(x, weight.t()),
        "behind": partial(with_adapters, F.linear),
        "before": partial(with_adapters, linear),
    }
    if names:
        for way in ("plain", "accumulate"):
            print(f"{name} {way}: {', '.join(kernel_names(partial(calls[way], inputs[0])))}")
    taken = {way: call_us(by_turns_of(inputs, call), 20) for way, call in calls.items()}
    plain = taken.pop("plain")
    over = {f"{way}_more": us - plain for way, us in taken.items()}
    return {"rows": count, "product": name, "plain_us": plain, **over}


def products(rank: int, counts: list[int]) -> Rows:
    layer = random_layer(rank)
    return [
        product_row(name, one, count, names=count == counts[-1])
        for count in counts
        for name, one in layer.items()
    ]


def kernel_rows(name: str, one: Projection, count: int, copied: float) -> Rows:
    """Kernels of one product by launch; `copied`: TB/s of a copy."""
    (n, k), own = one.weight.shape, one.adapters
    groups = group_rows(Arm.of(ARMS["one"](count), 0).slots, num_slots=SLOTS, block=BLOCK)
    xs, ys = drawn(count, k), drawn(count, n)
    u = lora_shrink(xs[0], groups, own)
    found: Rows = []

    def add(
        kernel: str, launch: Launch | None, moved: int,
        inputs: Sequence[Tensor], call: Callable[[Tensor], object],
    ) -> None:  # fmt: skip
        us = call_us(by_turns_of(inputs, call), 20)
        text = launch and " ".join(f"{f.name}={getattr(launch, f.name)}" for f in fields(launch))
        found.append(
            {"rows": count, "product": name, "kernel": kernel, "us": us,
             "gb_s": moved / us / 1e3, "of_copy": moved / us / 1e6 / copied, "launch": text}
        )  # fmt: skip

    for shrink in SHRINKS:
        add("shrink", shrink, 2 * count * k, xs,
            lambda x, c=shrink: lora_shrink(x, groups, own, config=c))  # fmt: skip
    for config in WRITES:
        add("write", config, 2 * count * n, ys,
            lambda y, c=config: lora_expand(y, u, groups, own, add=False, config=c))  # fmt: skip
    for config in ADDS:
        add("add", config, 4 * count * n, ys,
            lambda y, c=config: lora_expand(y, u, groups, own, config=c))  # fmt: skip
    if name == "gate_up":
        add("silu_mul", None, 3 * count * n, ys, silu_mul)
        for gate in GATES:
            add("gate", gate, 3 * count * n, ys,
                lambda y, c=gate: lora_gate(y, u, groups, own, name="silu", config=c))  # fmt: skip
    return found


def alone(rank: int, counts: list[int]) -> Rows:
    copied = copy_bandwidth()
    print(f"copy {copied:.2f} TB/s")
    layer = random_layer(rank)
    return [
        row
        for count in counts
        for name, one in layer.items()
        for row in kernel_rows(name, one, count, copied)
    ]


@torch.inference_mode()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--what", type=names_of(WHAT), default=["steps"], help=", ".join(WHAT))
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of `steps`")
    parser.add_argument("--prompts", type=numbers, default=PROMPTS, help="rows of the others")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    results: dict[str, Any] = {"rank": args.rank, "slots": SLOTS}
    worst = 0.0
    for what in args.what:
        if what == "steps":
            results["rows"], worst = steps(args.rank, args.rows)
            results["worst_difference"] = worst
            print_table(results["rows"])
        else:
            measure = {"prompts": prompts, "products": products, "alone": alone}[what]
            results[what] = measure(args.rank, args.prompts)
            print_table(results[what])
            worst = max(worst, *(row.get("difference") or 0.0 for row in results[what]))
    write_results("kernels_lora", results, args.out)
    if not worst < WORST:
        raise SystemExit(f"two ways differ by {worst:.2g}")


if __name__ == "__main__":
    main()
