"""Packed products of csrc/step/matmul.cpp beside a plain read of their weights and torch's oneDNN.

Weights are cold: as many copies as outgrow the caches take turns. The three are timed in turns, and
the best try of each counts. GB/s are bytes of weights over time, GFLOP/s two for each product of
the model's own sizes. oneDNN gets weights that were packed for the number of rows; its figures
hold one Python call per product, ours none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.common import bench_parser, report
from bench.cpu_limits import ReadProbe, best_seconds
from bench.kernels.native_parts import (
    STRIP,
    Format,
    PackedMatrix,
    empty_matrix,
    multiply,
    pack,
    prepare,
)
from hetero_llm.cpu import native

SIZES = {
    "68M": ((768, 2304), (768, 768), (768, 6144), (3072, 768), (768, 32000)),
    "1.1B": ((2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048)),
}  # depth, outputs
ROWS = (1, 2, 4, 8, 32, 512)
FORMATS = ("BF16", "FLOAT", "INT8", "INT4")
COLD_BYTES = 256 << 20
MOST_FLOP = 1e11  # of one try
PANEL_STRIPS = 4


def random_weight(outputs: int, depth: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((outputs, depth), dtype=np.float32)


def cold_matrix(library: Any, format: Format, outputs: int, *, depth: int) -> PackedMatrix:
    """Equal copies of one weight, COLD_BYTES of them."""
    one = empty_matrix(library, format, outputs, depth=depth)
    pack(library, one, random_weight(outputs, depth))
    copies = -(-COLD_BYTES // one.data.size)
    data = empty_matrix(library, format, outputs, depth=depth, copies=copies).data
    data.reshape(copies, -1)[:] = one.data
    return replace(one, data=data, copies=copies)


def ours(
    library: Any,
    matrix: PackedMatrix,
    rows: int,
    *,
    isa: int,
    pool: ThreadPoolExecutor,
    threads: int,
) -> Callable[[], Any]:
    """A call that multiplies all copies; threads share the panels."""
    x = np.random.default_rng(1).standard_normal((rows, matrix.depth), dtype=np.float32)
    prepared = prepare(library, matrix.format, x, isa=isa)
    out = np.empty((rows, matrix.padded_outputs), np.float32)
    panels = matrix.padded_outputs // STRIP // PANEL_STRIPS
    edges = [PANEL_STRIPS * (panels * i // threads) for i in range(threads + 1)]

    def share(i: int) -> None:
        multiply(library, matrix, prepared, isa=isa, out=out, first=edges[i],
                 strips=edges[i + 1] - edges[i])  # fmt: skip

    return lambda: list(pool.map(share, range(threads)))


def onednn(outputs: int, depth: int, rows: int, *, copies: int) -> Callable[[], Any]:
    """torch's packed bf16 product with as many copies of the weight."""
    weight = torch.from_numpy(random_weight(outputs, depth)).bfloat16()
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for _ in range(copies)]
    x = torch.randn(rows, depth).bfloat16()

    def call() -> None:
        for each in packed:
            torch.ops.mkldnn._linear_pointwise(x, each, None, "none", [], "")

    return call


def size_rows(args: argparse.Namespace, library: Any, format: Format, *, size: Any) -> Any:
    """One line for each number of rows."""
    depth, outputs = size
    matrix = cold_matrix(library, format, outputs, depth=depth)
    one_bytes = matrix.data.size / matrix.copies
    with ThreadPoolExecutor(args.threads) as pool:
        for rows in args.rows:
            flop = 2.0 * rows * depth * outputs
            copies = max(1, min(matrix.copies, int(MOST_FLOP / flop)))
            some = replace(matrix, data=matrix.data[: int(one_bytes) * copies], copies=copies)
            calls = [ours(library, some, rows, isa=args.isa, pool=pool, threads=args.threads)]
            if format is Format.BF16:
                calls.append(onednn(outputs, depth, rows, copies=copies))
            seconds = [s / copies for s in best_seconds(calls, args.rounds + 1)]
            with ReadProbe(int(one_bytes) * matrix.copies, args.threads) as probe:
                read = probe.gigabytes_per_s(tries=3)
            result = {
                "format": format.name, "depth": depth, "outputs": outputs, "rows": rows,
                "us": seconds[0] * 1e6, "GB/s": one_bytes / seconds[0] / 1e9, "read GB/s": read,
                "GFLOP/s": flop / seconds[0] / 1e9,
            }  # fmt: skip
            other = seconds[1] if len(seconds) > 1 else float("nan")
            result |= {"onednn GFLOP/s": flop / other / 1e9, "of onednn": other / seconds[0]}
            yield result


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--formats", choices=FORMATS, nargs="*", default=["BF16"])
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--isa", type=int, default=-1, help="level of isa.h; -1: the best")
    args = parser.parse_args()
    library = native.load()
    if library is None:
        parser.error("the library could not be built")
    args.isa = native.isa_level(library) if args.isa < 0 else args.isa
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        table = [
            row
            for name in args.formats
            for model in args.model
            for size in SIZES[model]
            for row in size_rows(args, library, Format[name], size=size)
        ]
    report("kernels_cpu_matmul", {"isa": native.ISA_NAMES[args.isa]}, table, args.out)


if __name__ == "__main__":
    main()
