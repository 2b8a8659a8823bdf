"""Experts of a mixture: our kernels beside a library product per expert, at the speed of reading.

    python -m bench.kernels.experts [--shape mixtral-8x7b] [--rows 1 32 ...] [--forms fp8,int4,...]
        [--out FILE]

One layer's experts at random routes, each call in a CUDA graph. `library_us`: for each visited
expert, known beforehand, gathered rows through `F.linear`, activation, `F.linear`, weighted sum.
TB/s counts the weights of the visited experts. A second table has weights quantized in each of the
`--forms` (of `bench.kernels.quantized_gemm`) beside bf16 ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.common import Rows, bench_parser, names_of, print_table, write_results
from bench.gpu_timing import largest_error, need_cuda, queued_us
from bench.kernels.quantized_gemm import FORMS, Form, random_matrix
from hetero_llm.gpu.kernels import experts as op
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.experts import GroupedConfig, Groups
from hetero_llm.gpu.kernels.quantized_experts import quantized_experts
from hetero_llm.gpu.kernels.routing import (
    gate_product,
    gate_product_reference,
    route_sigmoid,
    route_sparse_mixer,
    route_top_k,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Dims:
    """One layer's experts."""

    experts: int
    k: int
    hidden: int
    inner: int


MODELS = {
    "mixtral-8x7b": Dims(8, 2, 4096, 14336),
    "qwen1.5-moe-a2.7b": Dims(60, 4, 2048, 1408),
    "phi-3.5-moe": Dims(16, 2, 4096, 6400),
    "qwen3-30b-a3b": Dims(128, 8, 2048, 768),
    "glm-4.5-air": Dims(128, 8, 4096, 1408),
    "minimax-m2": Dims(256, 8, 3072, 1536),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Weights and the routes of some rows."""

    dims: Dims
    gate_up: Tensor
    down: Tensor
    x: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def touched(self) -> int:
        return self.ids.unique().numel()

    @property
    def weight_bytes(self) -> float:
        """Of the visited experts."""
        return 6.0 * self.dims.hidden * self.dims.inner * self.touched


def each_us(call: Callable[[], object], calls: int = 4) -> float:
    """Microseconds of one call of a CUDA graph of `calls`."""
    return queued_us(lambda: [call() for _ in range(calls)]) / calls


def make_case(dims: Dims, gate_up: Tensor, down: Tensor, rows: int) -> Case:
    x = torch.randn(rows, dims.hidden, device="cuda", dtype=BF16)
    logits = torch.randn(rows, dims.experts, device="cuda", dtype=BF16)
    ids, weights = route_top_k(logits, k=dims.k, renormalize=True, rounded=False)
    return Case(dims, gate_up, down, x, logits, ids, weights)


def library_us(case: Case) -> float:
    """See the module; None of it asks the device which experts are visited."""
    visits = [
        (expert, *(case.ids == expert).nonzero(as_tuple=True))
        for expert in case.ids.unique().tolist()
    ]

    def run() -> None:
        total = torch.zeros(case.x.shape, dtype=torch.float32, device="cuda")
        for expert, row, place in visits:
            gate, up = F.linear(case.x[row], case.gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, case.down[expert])
            total.index_add_(0, row, out.float() * case.weights[row, place].unsqueeze(1))

    return queued_us(run)


def error(case: Case) -> float:
    """Largest difference from the torch path over its largest value."""
    arguments = (case.x, case.ids, case.weights, case.gate_up, case.down)
    ours = op.experts(*arguments, activation="silu")
    expected = op.experts_reference(*arguments, activation="silu")
    return largest_error(ours, expected)


def parts_us(case: Case) -> dict[str, float]:
    """Each kernel of a call of `experts` by itself."""
    dims, rows = case.dims, case.x.shape[0]
    times = {
        "route_us": each_us(
            lambda: route_top_k(case.logits, k=dims.k, renormalize=True, rounded=False), 20
        ),
        "mixer_us": each_us(lambda: route_sparse_mixer(case.logits, jitter=0.01), 20),
        **sigmoid_us(case),
    }
    first, second = op.choose(rows, dims.k, dims.experts, 2)
    groups = op.align(case.ids, dims.experts, first.block_m)
    middle = op.grouped_product(case.x, case.gate_up, groups, activation="silu", config=first)
    parts = op.grouped_product(middle, case.down, groups, activation="", config=second)
    times["align_us"] = each_us(lambda: op.align(case.ids, dims.experts, first.block_m), 20)
    times["combine_us"] = each_us(lambda: op.combine(parts, case.weights), 20)
    times["gate_up_us"] = product_us(case, groups, "gate_up", first)
    times["down_us"] = product_us(case, groups, "down", second)
    return times


def sigmoid_us(case: Case) -> dict[str, float]:
    """Routers in float32: the routing, and the projection beside the library's."""
    dims = case.dims
    gate = torch.randn(dims.experts, dims.hidden, device="cuda") / dims.hidden**0.5
    correction = torch.zeros(dims.experts, device="cuda")
    logits = gate_product(case.x, gate)
    route = partial(
        route_sigmoid, logits, correction=correction, k=dims.k, groups=1, kept_groups=1,
        renormalize=True, scale=1.0,
    )  # fmt: skip
    return {
        "sigmoid_us": each_us(route, 20),
        "gate_us": each_us(lambda: gate_product(case.x, gate), 20),
        "gate_library_us": each_us(lambda: gate_product_reference(case.x, gate), 20),
    }


def product_us(case: Case, groups: Groups, part: str, config: GroupedConfig) -> float:
    """One of the two products alone; every call finds the weights in memory, if they are larger
    than L2."""
    dims = case.dims
    if part == "gate_up":
        x, weight, width, activation = case.x, case.gate_up, dims.inner, "silu"
    else:
        x = torch.randn(groups.num_pairs, dims.inner, device="cuda", dtype=BF16)
        weight, width, activation = case.down, dims.hidden, ""
    y = torch.empty(groups.num_pairs, width, device="cuda", dtype=BF16)
    launch = op.plan_grouped_product(x, weight, groups, y=y, activation=activation, config=config)
    return each_us(launch)


def row_of(case: Case) -> dict[str, Any]:
    dims, rows = case.dims, case.x.shape[0]
    arguments = (case.x, case.ids, case.weights, case.gate_up, case.down)
    calls = 4 if rows < 1024 else 1
    ours = each_us(lambda: op.experts(*arguments, activation="silu"), calls)
    flops = 6 * rows * dims.k * dims.hidden * dims.inner
    return {
        "rows": rows,
        "touched": case.touched,
        "library_us": library_us(case),
        "ours_us": ours,
        "TB/s": case.weight_bytes / ours / 1e6,
        "TFLOP/s": flops / ours / 1e6,
        **parts_us(case),
        "error": error(case),
    }


def quantized_rows(cases: list[Case], name: str, form: Form) -> Rows:
    """Quantized weights beside bf16, and their largest error against what they stand for in it."""
    dims = cases[0].dims
    gate_up = random_matrix(form, dims.experts * 2 * dims.inner, dims.hidden)
    down = random_matrix(form, dims.experts * dims.hidden, dims.inner)
    dense = [
        dequantize_to(matrix, torch.empty(matrix.shape, device="cuda", dtype=BF16))
        for matrix in (gate_up, down)
    ]
    plain = (dense[0].view_as(cases[0].gate_up), dense[1].view_as(cases[0].down))
    rows = []
    for case in cases:
        routes, calls = (case.x, case.ids, case.weights), 4 if len(case.x) < 1024 else 1
        run = partial(quantized_experts, *routes, gate_up, down, activation="silu")
        y, expected = run(), op.experts(*routes, *plain, activation="silu")
        us = each_us(run, calls)
        bf16_us = each_us(partial(op.experts, *routes, *plain, activation="silu"), calls)
        read = (gate_up.nbytes + down.nbytes) * case.touched / dims.experts
        rows.append(
            {
                "form": name,
                "rows": len(case.x),
                "us": us,
                "bf16_us": bf16_us,
                "speedup": bf16_us / us,
                "TB/s": read / us / 1e6,
                "error": largest_error(y, expected),
            }
        )
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=MODELS, default="mixtral-8x7b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    default = ["fp8", "fp8_block", "int4"]
    parser.add_argument("--forms", type=names_of(tuple(FORMS)), default=default)
    args = parser.parse_args()
    need_cuda()
    torch.manual_seed(0)
    dims = MODELS[args.shape]
    sizes = (dims.experts, 2 * dims.inner, dims.hidden), (dims.experts, dims.hidden, dims.inner)
    gate_up, down = (
        torch.empty(size, device="cuda", dtype=BF16).normal_(std=size[2] ** -0.5) for size in sizes
    )
    cases = [make_case(dims, gate_up, down, rows) for rows in args.rows]
    rows = [row_of(case) for case in cases]
    print(f"{args.shape}, Triton {triton.__version__}")
    print_table(rows)
    quantized = [row for name in args.forms for row in quantized_rows(cases, name, FORMS[name])]
    print_table(quantized)
    results = {"shape": args.shape, "rows": rows, "quantized": quantized}
    write_results(f"kernels_experts.{args.shape}", results, args.out)
    if not max(row["error"] for row in (*rows, *quantized)) < 3e-2:
        raise SystemExit("a kernel is wrong")


if __name__ == "__main__":
    main()
