"""Products with quantized weights beside cuBLAS in bf16, by kind, layer and number of rows.

Few rows: our kernels with the launch that `choose` names (`us`), up to 256 rows; from 65 on also
the other way of a `QuantizedProduct` (`many_us`); fp8 with a scale for each row also by
`fp8_linear` (`fp8_us`, rows made before). With `--tune` other launches are timed as well: `best_us`
is the fastest, which belongs in the kernel's table. `share`: bytes of the prepared matrix, of x and
of y, over the time, over the speed of a large copy in the same run. Weights are random and as many
as keep L2 from holding them; all is timed in CUDA graphs. `step` adds up the layers of a model:
what they would take in one step, and the share of the copy speed that all of it reaches. Many rows:
`us` by the library, which quantizes rows (`bits` 8) or dequantizes the matrix (16), `few_us` by the
kernels of few rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import (
    Rows,
    bench_parser,
    names_of,
    numbers,
    print_table,
    say,
    write_results,
)
from bench.gpu_timing import copy_bandwidth, largest_error, need_cuda, queued_us
from bench.kernels.skinny_gemm import L2_BYTES, MODELS, compile_all, label, rows_like
from hetero_llm.gpu.kernels import fp8_gemm
from hetero_llm.gpu.kernels.block_product import find_block_product
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.quantize_rows import quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import (
    PreparedMatrix,
    choose,
    fits,
    plan_launch,
    prepare,
    shared_bytes,
)
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct, parts_of
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


FORMS = {
    "fp8": Form("fp8", scale_dtype=torch.float32),
    "fp8_block": Form("fp8", 128, BLOCK_ROWS, torch.float32),
    "int8": Form("int8", scale_dtype=torch.float32),
    "int4": Form("int4", 128, zeros=True),
    "int4_symmetric": Form("int4", 128),
    "fp4_32": Form("fp4", 32, scale_dtype=torch.bfloat16),
    "fp4_16": Form("fp4", 16, scale_dtype=torch.float8_e4m3fn),
    "nf4": Form("nf4", 64, scale_dtype=torch.float32),
}


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
    return prepare(matrix)


# Features, columns, stages and warps of a program, by padded rows: those that `--tune` times.
TILES = {
    8: [(32, 256, 4, 1), (32, 256, 3, 2), (64, 256, 3, 2)],
    16: [(32, 256, 3, 1), (64, 256, 3, 2), (64, 256, 3, 4)],
    32: [(32, 256, 3, 2), (64, 256, 3, 4), (128, 256, 3, 8)],
    64: [(64, 256, 3, 4), (128, 256, 3, 8), (128, 128, 4, 8)],
    128: [
        *((128, 256, 2, 8), (128, 256, 3, 8), (128, 128, 3, 4), (128, 128, 4, 8)),
        *((256, 128, 3, 8), (256, 128, 4, 8), (256, 128, 4, 16)),
    ],
}


def candidates(m: int, matrix: PreparedMatrix) -> list[SkinnyConfig]:
    """Launches worth timing, what `choose` says first."""
    configs = [choose(m, matrix)]
    block_m = next((size for size in TILES if m <= size), 128)
    for block_n, block_k, stages, warps in TILES[block_m]:
        for split in (1, 2, 4, 8, 16):
            programs = -(-matrix.shape[0] // block_n) * split
            # Large tiles: one or two programs a multiprocessor; small ones by their warps.
            if m > 64:
                useful = 90 <= programs * -(-m // 128) <= 264
            else:
                useful = 600 <= programs * warps <= 1600
            if useful:
                configs.append(SkinnyConfig(block_m, block_n, block_k, split, warps, stages))
    return [c for c in dict.fromkeys(configs) if fits(c, m, matrix) and _in_memory(c, matrix)]


def _in_memory(config: SkinnyConfig, matrix: PreparedMatrix) -> bool:
    """Whether the pipeline fits a multiprocessor's 227 KB."""
    return config.block_m == 1 or shared_bytes(config, matrix) <= 227 << 10


def copies_of(matrix_bytes: int, make: Callable[[], Any]) -> list[Any]:
    """As many as do not fit L2 together."""
    return [make() for _ in range(max(2, int(2.5 * L2_BYTES / matrix_bytes) + 1))]


def time_few(
    matrices: list[PreparedMatrix], plain: list[Tensor], m: int, *, tune: bool
) -> dict[str, Any]:
    """One layer at one number of rows."""
    n, k = matrices[0].shape
    x, y = rows_like((n, k), m)
    exact = F.linear(x.float(), dequantize_to(matrices[0], torch.empty(n, k, device="cuda")))
    library = queued_us(lambda: [F.linear(x, w) for w in plain]) / len(plain)
    configs = candidates(m, matrices[0]) if tune else [choose(m, matrices[0])]
    plans = {c: [plan_launch(x, w, None, y=y, config=c) for w in matrices] for c in configs}
    compile_all([plan[0] for plan in plans.values()])
    times, errors = {}, []
    for config, plan in plans.items():
        y.zero_()
        try:
            plan[0]()
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory: not one of the candidates then
            print(f"  {label(config)}: {error}", flush=True)
            continue
        errors.append(largest_error(y, exact))
        times[config] = queued_us(lambda plan=plan: [launch() for launch in plan]) / len(plan)
    best = min(times, key=lambda config: times[config])
    many_us = float("nan")
    if m > 64:
        products = [QuantizedProduct(w) for w in matrices]
        many = lambda: [p.of_many_rows(x, None, in_8_bits=True) for p in products]  # noqa: E731
        many_us = queued_us(many) / len(products)
    fp8_us = float("nan")
    if 1 < m <= fp8_gemm.MAX_ROWS and fp8_gemm.serves(matrices[0]):
        made = quantize_rows(x, matrices[0], parts=parts_of(m))
        error = largest_error(fp8_gemm.fp8_linear(made, matrices[0]), exact)
        errors.append(
            error if parts_of(m) == 2 else error * WORST_ERROR["few"] / WORST_ERROR["many"]
        )
        fp8_us = queued_us(lambda: [fp8_gemm.fp8_linear(made, w) for w in matrices]) / len(matrices)
    return {
        "bytes": matrices[0].nbytes + x.nbytes + y.nbytes,
        "bf16_us": library,
        "us": times.get(configs[0], float("nan")),
        "best_us": times[best],
        "best": label(best),
        "many_us": many_us,
        "fp8_us": fp8_us,
        "error": max(errors),
    }


def few_rows(args: argparse.Namespace, copy: float) -> tuple[Rows, Rows]:
    """Rows of layers and of whole steps; prints one table for each kind."""
    dims = MODELS[args.shape]
    results: Rows = []
    steps: Rows = []
    for name in args.kinds:
        step: dict[int, dict[str, float]] = {}
        for layer in LAYERS:
            n, k = dims.shapes()[layer]
            first = random_matrix(FORMS[name], n, k)
            make = lambda: random_matrix(FORMS[name], n, k)  # noqa: B023, E731
            matrices = [first, *copies_of(first.nbytes, make)]
            plain = copies_of(2 * n * k, lambda: torch.randn(n, k, device="cuda").bfloat16())  # noqa: B023
            for m in args.rows:
                cell = time_few(matrices, plain, m, tune=args.tune)
                moved = cell.pop("bytes")
                row = {"kind": name, "layer": layer, "rows": m, **cell}
                row["share"] = moved / cell["us"] / copy / 1e6
                results.append(row)
                say(row)
                total = step.setdefault(m, defaultdict(float))
                for part in ("bf16", "many", "fp8", "chosen", "best"):
                    us = cell["us" if part == "chosen" else f"{part}_us"]
                    total[part] += us * dims.layers / 1e3
                total["GB"] += moved * dims.layers / 1e9
        steps += [
            {"step": name, "rows": m, **total, "share": total["GB"] / total["chosen"] / copy,
             "best share": total["GB"] / total["best"] / copy}
            for m, total in step.items()
        ]  # fmt: skip
        print_table(steps[-len(step) :])
    return results, steps


def many_rows(args: argparse.Namespace) -> Rows:
    """Both ways of a `QuantizedProduct` beside the bf16 product."""
    results: Rows = []
    block_product = find_block_product(torch.device("cuda", torch.cuda.current_device()))
    for name in args.kinds:
        for layer in LAYERS:
            n, k = MODELS[args.shape].shapes()[layer]
            product = QuantizedProduct(random_matrix(FORMS[name], n, k), block_product)
            plain = dequantize_to(product.matrix, torch.empty(n, k, device="cuda").bfloat16())
            for m in args.many:
                x, _ = rows_like((n, k), m)
                found = product.of_many_rows(x, None, in_8_bits=True)
                few = m <= POINTS[-1]
                row = {
                    "kind": name,
                    "layer": layer,
                    "rows": m,
                    "bf16_us": queued_us(lambda: F.linear(x, plain)),  # noqa: B023
                    "us": queued_us(lambda: product.of_many_rows(x, None, in_8_bits=True)),  # noqa: B023
                    "few_us": queued_us(lambda: product.of_few_rows(x, None)) if few else "-",  # noqa: B023
                    "bits": 8 if product.can_quantize(x) else 16,
                    "error": largest_error(found, F.linear(x, plain)),
                }
                results.append(row)
                say(row)
    return results


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--kinds", type=names_of(tuple(FORMS)), default=list(FORMS))
    parser.add_argument("--rows", type=numbers, default=FEW)
    parser.add_argument("--many", type=numbers, default=MANY)
    parser.add_argument("--no-many", dest="many", action="store_const", const=[])
    parser.add_argument("--tune", action="store_true", help="time other launches, too")
    args = parser.parse_args()
    need_cuda()
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
