"""Products with weights row after row, as checkpoints have them, beside those with packed panels.

    python -m bench.kernels.expert_layouts [--rows 1,4,16] [--depth 4096] [--outputs 3072]

One thread; weights are cold, as many copies as outgrow the caches take turns. "rows" are the dot
products of csrc/experts, which take bf16 inputs and convert each weight to bf16; "panels" those of
csrc/step/matmul.cpp, which for int8 and int4 quantize the inputs to 8 bits: less work, other
results. Both and a plain read of as many bytes are timed in turns, in CPU time of the thread, which
other programs lengthen less than the clock's; the best try of each counts. AMX tiles serve neither
arm ("rows" has them in `bench.kernels.expert_team`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.common import bench_parser, numbers, print_table, write_results
from bench.cpu_limits import ReadProbe
from bench.kernels.cpu_matmul import cold_matrix
from bench.kernels.expert_team import KINDS, Kind, allocate, fill_with_weights
from bench.kernels.native_parts import Format, multiply, prepare
from hetero_llm.cpu import native

_COLD_BYTES = 192 << 20
_PACKED = {"bf16": Format.BF16, "int8": Format.INT8, "int4": Format.INT4}
_FORMS = {"bfloat16": 1, "int8": 3, "fp8": 4, "int4": 5, "fp4": 6}
_SCALES = {None: 0, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AVX512_BF16 = native.ISA_NAMES.index("avx512_bf16")


def by_rows(
    library: Any, kind: Kind, outputs: int, *, depth: int, rows: int, isa: int
) -> tuple[Callable[[], Any], int]:
    """A call that multiplies all copies, and their bytes of weights."""
    one = outputs * depth * kind.bits // 8
    copies = -(-_COLD_BYTES // one)
    data = allocate(copies * one, pinned=False)
    fill_with_weights(data)
    scale = torch.full((outputs, depth // 32), 0.01, dtype=kind.scale or torch.float32)
    form = (ctypes.c_int64 * 7)(
        _FORMS[kind.name], _SCALES[kind.scale], kind.group or depth, kind.scale_rows, outputs,
        depth, 0,
    )  # fmt: skip
    x = torch.randn(rows, depth).bfloat16()
    out = torch.empty(rows, outputs)
    function = library.hetero_experts_dots
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = [*[pointer] * 5, long, long, pointer, long, long, long]

    def call() -> None:
        function(form, data.data_ptr(), scale.data_ptr(), None, x.data_ptr(), 2 * depth, rows,
                 out.data_ptr(), 1, copies, isa)  # fmt: skip

    return call, copies * one


def by_panels(
    library: Any, format: Format, outputs: int, *, depth: int, rows: int, isa: int
) -> tuple[Callable[[], Any], int]:
    """The same of packed panels."""
    matrix = cold_matrix(library, format, outputs, depth=depth)
    x = np.random.default_rng(1).standard_normal((rows, depth), dtype=np.float32)
    prepared = prepare(library, format, x, isa=isa)
    out = np.empty((rows, matrix.padded_outputs), np.float32)
    return lambda: multiply(library, matrix, prepared, isa=isa, out=out), matrix.data.size


def best_rates(arms: list[tuple[Callable[[], Any], int]], tries: int) -> list[float]:
    """GB/s of each arm's best try, in turns."""
    best = [float("inf")] * len(arms)
    for _ in range(tries):
        for i, (call, _) in enumerate(arms):
            begin = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - begin)
    return [size / seconds / 1e9 for (_, size), seconds in zip(arms, best, strict=True)]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16], help="comma-separated")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--tries", type=int, default=7)
    args = parser.parse_args()
    library = native.load()
    if library is None:
        parser.error("the library could not be built")
    isa = min(native.isa_level(library), _AVX512_BF16)
    if isa < _AVX512_BF16:
        parser.error("products of bf16 inputs need AVX-512 with bfloat16")
    torch.set_num_threads(1)
    sizes = {"depth": args.depth, "isa": isa}
    table = []
    for name in args.kinds:
        for rows in args.rows:
            arms = [by_rows(library, KINDS[name], args.outputs, rows=rows, **sizes)]
            if name in _PACKED:
                arms.append(by_panels(library, _PACKED[name], args.outputs, rows=rows, **sizes))
            rates = best_rates(arms, args.tries)
            with ReadProbe(arms[0][1], 1) as probe:
                read = probe.gigabytes_per_s(tries=args.tries)
            packed = rates[1] if len(rates) > 1 else float("nan")
            table.append(
                {"kind": name, "rows": rows, "rows_gb_s": rates[0], "panels_gb_s": packed,
                 "read_gb_s": read, "rows/panels": rates[0] / packed, "of_read": rates[0] / read}
            )  # fmt: skip
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in table[-1].items()},
                  flush=True)  # fmt: skip
    print_table(table)
    write_results(
        "kernels_expert_layouts", {**sizes, "outputs": args.outputs, "rows": table}, args.out
    )


if __name__ == "__main__":
    main()
