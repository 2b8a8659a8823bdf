"""Products with quantized weights beside cuBLAS in bf16, by kind, layer and number of rows.

Few rows: our kernels, with the launch that `choose` names (`us`) and with the best of all
candidates (`best_us`; `fold_us` is that one with scales where `folds` does not put them), up to 256
rows; from 65 on also the other way of a `QuantizedProduct` (`many_us`). `share`: bytes of the
prepared matrix, of x and of y, over the time, over the speed of a large copy in the same run.
Weights are random and as many as keep L2 from holding them; all is timed in CUDA graphs. `step`
adds up the layers of a model: what they would take in one step, and the share of the copy speed
that all of it reaches. Many rows: `us` by the library, which quantizes rows (`bits` 8) or
dequantizes the matrix (16), `few_us` by the kernels of few rows.

Predictions for the 8B shape (6.98e9 weights in its layers), before anything was measured. Bytes at
a copy speed of 4.2 TB/s; instructions for an element as counted in the SASS of the inner loops, at
70% of 132 x 128 a clock at 1.755 GHz; reads from L2, in which x is read once for each tile of
features, at 5.5 TB/s (an assumption). The largest of the three, and 10% for all else, is what a
step's layers should take, in ms:

| at 1 / 8 / 32 / 64 rows | bytes | instructions | their time | L2 | layers of a step |
|---|---|---|---|---|---|
| fp8, a row | 1.66 | 3.2/2.7/3.0/3.1 | 1.1/0.9/1.0/1.1 | 2.5 at 64 | 1.8 / 1.8 / 1.9 / 2.8 |
| fp8, 128 x 128 | 1.66 | 3.3/3.4/3.6/4.0 | 1.1/1.2/1.2/1.3 | 2.5 | 1.8 / 1.8 / 1.9 / 2.8 |
| int8, a row | 1.66 | 3.9/3.1/3.5/3.6 | 1.3/1.1/1.2/1.2 | 2.5 | 1.8 / 1.8 / 1.9 / 2.8 |
| int4, 128, zeros | 0.88 | 2.6/2.6/3.1/3.4 | 0.9/0.9/1.0/1.1 | 1.9 | 1.0 / 1.0 / 1.4 / 2.1 |
| fp4, 32 | 0.88 | 4.2/4.2/5.3/6.5 | 1.4/1.4/1.8/2.2 | 1.9 | 1.6 / 1.6 / 2.0 / 2.4 |
| fp4, 16 (e4m3) | 0.94 | 5.7/5.7/7.9/9.9 | 1.9/1.9/2.7/3.3 | 2.0 | 2.1 / 2.1 / 3.0 / 3.7 |
| nf4, 64 | 0.93 | 5.6/5.6/6.5/7.0 | 1.9/1.9/2.2/2.4 | 2.0 | 2.1 / 2.1 / 2.4 / 2.6 |

Many rows, layers of a step in ms, by the same reasoning: bytes at 76% of 4.2 TB/s (what cuBLAS
reaches in bf16 at 128 rows), arithmetic at 700 TFLOP/s in bf16 and 1,250 in fp8 (an assumption),
dequantizing 2.5 bytes a weight of 4 bits, at 4.2 TB/s, and reading the result again.

| rows | bf16 | fp8, a row and blocks | 4 bits dequantized | int4 by few-row kernels | nf4 so |
|---|---|---|---|---|---|
| 64 | 4.2 | 2.3 | 8.5 | 2.1 | 2.6 |
| 128 | 4.4 | 2.4 | 8.6 | 3.8 | 4.2 |
| 256 | 5.1 | 3.0 | 9.3 | 7.6 | 8.4 |
| 1024 | 20.4 | 11.7 | 24.6 | | |
| 4096 | 82 | 47 | 86 | | |

One row of 4 bits counts the tensor-core kernel, which `choose` takes there; the vector kernel's
counts are 4.6 (int4), 6.1 (fp4) and 7.8 (nf4).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import bench_parser, names_of, numbers, print_table, write_results
from bench.gpu_timing import copy_bandwidth
from bench.kernels.skinny_gemm import L2_BYTES, MODELS, compile_all, graph_us, label, rows_like
from hetero_llm.gpu.kernels.block_product import find_block_product
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.launch import Launch
from hetero_llm.gpu.kernels.quantized_gemm import (
    PreparedMatrix,
    choose,
    fits,
    folds,
    plan_launch,
    prepare,
    shared_bytes,
)
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig
from hetero_llm.gpu.switch_points import POINTS
from hetero_llm.quantization.matrix import BLOCK_ROWS, Kind, QuantizedMatrix

LAYERS = ("qkv", "o", "gate_up", "down")
FEW = [1, 8, 32, 64]
MANY = [64, 128, 256, 1024, 4096]
WORST_ERROR = {"few": 1e-2, "many": 6e-2}  # over the largest output; many rows may be quantized


@dataclass(frozen=True)
class Form:
    """A kind of weights with its scales."""

    kind: Kind
    group: int | None = None
    rows: int = 1
    scale_dtype: torch.dtype = torch.float16
    zeros: bool = False
    lanes: int | None = None  # of a chunk at most


FORMS = {
    "fp8": Form("fp8", scale_dtype=torch.float32),
    "fp8_block": Form("fp8", 128, BLOCK_ROWS, torch.float32),
    "int8": Form("int8", scale_dtype=torch.float32),
    "int4": Form("int4", 128, zeros=True),
    "int4_symmetric": Form("int4", 128),
    "fp4_32": Form("fp4", 32, scale_dtype=torch.bfloat16),
    "fp4_16": Form("fp4", 16, scale_dtype=torch.float8_e4m3fn),
    "nf4": Form("nf4", 64, scale_dtype=torch.float32),
    # Layouts beside the one of `prepare`: do small chunks cost what they give large tiles?
    "int4_64_lanes": Form("int4", 128, zeros=True, lanes=64),
    "int4_32_lanes": Form("int4", 128, zeros=True, lanes=32),
    "nf4_64_lanes": Form("nf4", 64, scale_dtype=torch.float32, lanes=64),
    "nf4_32_lanes": Form("nf4", 64, scale_dtype=torch.float32, lanes=32),
}
DEFAULT_KINDS = [name for name in FORMS if not name.endswith("_lanes")]


def random_matrix(form: Form, n: int, k: int) -> PreparedMatrix:
    """Codes of all values, scales that make products of order one."""
    if form.kind == "fp8":
        data = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    elif form.kind == "int8":
        data = torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8)
    else:
        data = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    largest = {"fp8": 1.0, "int8": 70.0, "int4": 5.0, "fp4": 3.0, "nf4": 0.5}[form.kind]
    group = form.group or k
    shape = (-(-n // form.rows), -(-k // group))
    scale = (0.5 + torch.rand(shape, device="cuda")) / (largest * k**0.5)
    if form.scale_dtype == torch.float8_e4m3fn:
        scale = scale * 256  # e4m3 has no smaller ones; a scale for all would take it off
    zero = torch.randint(6, 10, shape, device="cuda", dtype=torch.uint8) if form.zeros else None
    matrix = QuantizedMatrix(
        form.kind, data, scale.to(form.scale_dtype).contiguous(), group, form.rows, zero
    )
    return prepare(matrix, lanes=form.lanes)


# Features, columns, stages and warps of a program, by padded rows: those to time in a short run.
QUICK = {
    8: [(32, 256, 4, 1), (32, 256, 3, 2), (64, 256, 3, 2)],
    16: [(32, 256, 3, 1), (64, 256, 3, 2), (64, 256, 3, 4)],
    32: [(32, 256, 3, 2), (64, 256, 3, 4), (128, 256, 3, 8)],
    64: [(64, 256, 3, 4), (128, 256, 3, 8), (128, 128, 4, 8)],
    128: [
        *((128, 256, 2, 8), (128, 256, 3, 8), (128, 128, 3, 4), (128, 128, 4, 8)),
        *((256, 128, 3, 8), (256, 128, 4, 8), (256, 128, 4, 16)),
    ],
}


def candidates(m: int, matrix: PreparedMatrix, *, quick: bool) -> list[SkinnyConfig]:
    """All launches worth timing, or fewer, what `choose` says first."""
    configs = [choose(m, matrix)]
    block_m = next((size for size in (8, 16, 32, 64) if m <= size), 128)
    if quick:
        for block_n, block_k, stages, warps in QUICK[block_m]:
            for split in (1, 2, 4, 8, 16):
                programs = -(-matrix.shape[0] // block_n) * split
                # Large tiles: one or two programs a multiprocessor; small ones by their warps.
                if m > 64:
                    useful = 90 <= programs * -(-m // 128) <= 264
                else:
                    useful = 600 <= programs * warps <= 1600
                if useful:
                    launch = SkinnyConfig(block_m, block_n, block_k, split, warps, stages)
                    configs.append(launch)
        return [c for c in dict.fromkeys(configs) if fits(c, m, matrix) and _in_memory(c, matrix)]
    if m == 1:
        for block_n, warps, split in (
            *((8, 1, 1), (8, 2, 1), (8, 4, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1)),
            *((2, 1, 1), (2, 2, 1), (2, 4, 1), (4, 1, 2), (4, 2, 2), (8, 2, 2)),
        ):
            block_k = 256 * matrix.parts * warps
            configs.append(SkinnyConfig(1, block_n, block_k, split, warps))
    # Features, columns, stages, warps.
    few = [
        *((16, 256, 4, 1), (32, 128, 4, 2), (32, 128, 6, 2), (32, 256, 4, 1)),
        *((32, 256, 2, 2), (32, 256, 3, 2), (32, 256, 4, 2), (32, 256, 6, 2), (32, 512, 2, 2)),
        *((64, 256, 3, 2), (64, 256, 3, 4), (64, 256, 4, 4), (64, 256, 5, 4)),
    ]
    more = [
        *((32, 256, 2, 2), (32, 256, 3, 2), (64, 128, 3, 4), (64, 256, 2, 2)),
        *((64, 256, 2, 4), (64, 256, 3, 4), (128, 128, 3, 8), (128, 256, 2, 8), (128, 256, 3, 8)),
        *((128, 256, 4, 8), (128, 256, 2, 4)),
    ]
    most = [
        *((64, 128, 3, 4), (64, 256, 2, 4), (64, 256, 2, 8), (128, 128, 2, 8), (128, 128, 3, 8)),
        *((128, 64, 4, 4), (128, 256, 2, 4), (256, 64, 6, 8), (256, 128, 3, 16)),
        *QUICK[128],
    ]
    shapes = few if block_m <= 16 else (more if block_m <= 64 else most)
    for block_n, block_k, stages, warps in shapes:
        for split in (1, 2, 4, 8, 16):
            if (90 if m > 64 else 100) <= matrix.shape[0] // block_n * split <= 1800:
                configs.append(SkinnyConfig(block_m, block_n, block_k, split, warps, stages))
    return [c for c in dict.fromkeys(configs) if fits(c, m, matrix) and _in_memory(c, matrix)]


def _in_memory(config: SkinnyConfig, matrix: PreparedMatrix) -> bool:
    """Whether the pipeline fits a multiprocessor's 227 KB."""
    return config.block_m == 1 or shared_bytes(config, matrix) <= 227 << 10


def copies_of(matrix_bytes: int, make: Callable[[], Any]) -> list[Any]:
    """As many as do not fit L2 together."""
    return [make() for _ in range(max(2, int(2.5 * L2_BYTES / matrix_bytes) + 1))]


def time_few(
    matrices: list[PreparedMatrix], plain: list[Tensor], m: int, *, tuning: str
) -> dict[str, Any]:
    """One layer at one number of rows.

    Args:
        tuning: How many candidates: "all", "quick" or "none".
    """
    n, k = matrices[0].shape
    x, y = rows_like((n, k), m)
    exact = F.linear(x.float(), dequantize_to(matrices[0], torch.empty(n, k, device="cuda")))
    library = graph_us(lambda: [F.linear(x, w) for w in plain]) / len(plain)
    configs = [choose(m, matrices[0])]
    if tuning != "none":
        configs = candidates(m, matrices[0], quick=tuning == "quick")
    plans = {c: [plan_launch(x, w, None, y=y, config=c) for w in matrices] for c in configs}
    compile_all([plan[0] for plan in plans.values()])
    times, errors = {}, [0.0]

    def timed(config: SkinnyConfig, plan: list[Launch]) -> float:
        y.zero_()
        try:
            plan[0]()
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory: not one of the candidates then
            print(f"  {label(config)}: {error}", flush=True)
            return float("nan")
        errors.append(((y.float() - exact).abs().max() / exact.abs().max()).item())
        return graph_us(lambda: [launch() for launch in plan]) / len(plan)

    for config, plan in plans.items():
        us = timed(config, plan)
        if us == us:
            times[config] = us
    best = min(times, key=lambda config: times[config])
    fold_us = many_us = float("nan")
    first = matrices[0]
    if tuning != "none" and best.block_m > 1 and first.group > 0 and first.offset is None:
        other = not folds(first, best.block_m)
        plan = [plan_launch(x, w, None, y=y, config=best, fold=other) for w in matrices]
        fold_us = timed(best, plan)
    if m > 64:
        products = [QuantizedProduct(w) for w in matrices]
        many = lambda: [p.of_many_rows(x, None, in_8_bits=True) for p in products]  # noqa: E731
        many_us = graph_us(many) / len(products)
    return {
        "bytes": matrices[0].nbytes + x.nbytes + y.nbytes,
        "library_us": library,
        "us": times.get(configs[0], float("nan")),
        "best_us": times[best],
        "best": label(best),
        "fold_us": fold_us,
        "many_us": many_us,
        "error": max(errors),
        "all": {label(config): us for config, us in times.items()},
    }


def say(row: dict[str, Any]) -> None:
    """One line of a table, as soon as it is there."""
    values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
    print(" ".join(values), flush=True)


def few_rows(
    args: argparse.Namespace, copy: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of layers and of whole steps; prints one table for each kind."""
    dims = MODELS[args.shape]
    results, steps = [], []
    for name in args.kinds:
        step: dict[int, dict[str, float]] = {}
        for layer in LAYERS:
            n, k = dims.shapes()[layer]
            first = random_matrix(FORMS[name], n, k)
            make = lambda: random_matrix(FORMS[name], n, k)  # noqa: B023, E731
            matrices = [first, *copies_of(first.nbytes, make)]
            plain = copies_of(2 * n * k, lambda: torch.randn(n, k, device="cuda").bfloat16())  # noqa: B023
            for m in args.rows:
                cell = time_few(matrices, plain, m, tuning=args.tuning)
                row = {
                    "kind": name,
                    "layer": layer,
                    "rows": m,
                    "bf16_us": cell["library_us"],
                    "us": cell["us"],
                    "share": cell["bytes"] / cell["us"] / copy / 1e6,
                    "best_us": cell["best_us"],
                    "best share": cell["bytes"] / cell["best_us"] / copy / 1e6,
                    "fold_us": cell["fold_us"],
                    "many_us": cell["many_us"],
                    "error": cell["error"],
                    "best": cell["best"],
                }
                results.append({**row, "all": cell["all"]})
                say(row)
                total = step.setdefault(
                    m, dict.fromkeys(("bf16", "many", "chosen", "best", "GB"), 0.0)
                )
                total["bf16"] += cell["library_us"] * dims.layers / 1e3
                total["many"] += cell["many_us"] * dims.layers / 1e3
                total["chosen"] += cell["us"] * dims.layers / 1e3
                total["best"] += cell["best_us"] * dims.layers / 1e3
                total["GB"] += cell["bytes"] * dims.layers / 1e9
        steps += [
            {
                "step": name,
                "rows": m,
                **total,
                "share": total["GB"] / total["chosen"] / copy,
                "best share": total["GB"] / total["best"] / copy,
            }
            for m, total in step.items()
        ]
        print_table(steps[-len(step) :])
    return results, steps


def many_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways of a `QuantizedProduct` beside the bf16 product."""
    results = []
    block_product = find_block_product(torch.device("cuda", torch.cuda.current_device()))
    for name in args.kinds:
        for layer in LAYERS:
            n, k = MODELS[args.shape].shapes()[layer]
            product = QuantizedProduct(random_matrix(FORMS[name], n, k), block_product)
            plain = dequantize_to(product.matrix, torch.empty(n, k, device="cuda").bfloat16())
            for m in args.many:
                x, _ = rows_like((n, k), m)
                exact = F.linear(x, plain).float()
                wrong = product.of_many_rows(x, None, in_8_bits=True).float() - exact
                few = m <= POINTS[-1]
                row = {
                    "kind": name,
                    "layer": layer,
                    "rows": m,
                    "bf16_us": graph_us(lambda: F.linear(x, plain)),  # noqa: B023
                    "us": graph_us(lambda: product.of_many_rows(x, None, in_8_bits=True)),  # noqa: B023
                    "few_us": graph_us(lambda: product.of_few_rows(x, None)) if few else "-",  # noqa: B023
                    "bits": 8 if product.can_quantize(x) else 16,
                    "error": (wrong.abs().max() / exact.abs().max()).item(),
                }
                results.append(row)
                say(row)
    return results


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--kinds", type=names_of(tuple(FORMS)), default=DEFAULT_KINDS)
    parser.add_argument("--rows", type=numbers, default=FEW)
    parser.add_argument("--many", type=numbers, default=MANY)
    parser.add_argument("--no-many", dest="many", action="store_const", const=[])
    parser.add_argument(
        "--tuning", choices=("all", "quick", "none"), default="all", help="candidates to time"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"copy: {copy:.3g} TB/s", flush=True)
    (few, steps), many = few_rows(args, copy), many_rows(args)
    print_table(steps)
    results = {"shape": args.shape, "copy_TBps": copy, "few_rows": few, "many_rows": many}
    results["steps"] = steps
    write_results("kernels_quantized_gemm", results, args.out)
    for rows, limit in ((few, WORST_ERROR["few"]), (many, WORST_ERROR["many"])):
        if not all(row["error"] < limit for row in rows):
            raise SystemExit("a kernel is wrong")


if __name__ == "__main__":
    main()
