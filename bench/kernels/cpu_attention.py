"""Attention of a step's tokens on the CPU: the executor's plan against the torch path's.

    python -m bench.kernels.cpu_attention [--layers N] [--levels avx2 avx512_bf16] [--out FILE]

One thread for each, so that starting threads costs neither. Layers take turns: with the default
number, K and V come from memory at long contexts. A decoded token is given in GB/s of the K and V
that it reads, chunks and trees in GFLOP/s of the pairs that see each other. Both run alternately;
the best of several rounds counts, in time on the core, so that other work on the machine matters
less. The kernels are the same, but for short trees.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.common import bench_parser, report
from bench.cpu_limits import best_seconds
from bench.kernels.native_parts import AttentionTokens, StepAttention
from hetero_llm.cpu import native
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

BLOCK_SIZE = 16
ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int = 64


@dataclass(frozen=True)
class Rows:
    """`count` rows that follow `start` tokens of one sequence."""

    start: int
    count: int
    tree: bool = False

    @property
    def kind(self) -> str:
        return "tree" if self.tree else "decode" if self.count == 1 else "chunk"

    @property
    def pairs(self) -> float:
        """Rows times tokens they see; a tree here is a chain."""
        return self.count * (self.start + (self.count + 1) / 2)


SHAPES = (Shape(12, 12), Shape(32, 4), Shape(32, 8, 128))
WORK = (
    Rows(1279, 1),
    Rows(4095, 1),
    Rows(0, 512),
    Rows(4096, 512),
    Rows(1280, 8, tree=True),
    Rows(1280, 32, tree=True),
)


def ours(
    library: ctypes.CDLL, cache: torch.Tensor, table: np.ndarray, rows: Rows, heads: int, isa: int
) -> tuple[Callable[[], None], torch.Tensor]:
    ancestors = [(2 << i) - 1 if rows.tree else 0 for i in range(rows.count)]
    step = AttentionTokens(
        np.zeros(1, np.int32),
        np.array([rows.start], np.int32),
        np.array([rows.count], np.int32),
        np.array([rows.start], np.int32),
        np.array([rows.tree], np.uint8),
        np.array(ancestors, np.uint64),
        table.astype(np.int32).reshape(1, -1),
    )
    attention = StepAttention(library, 1)
    width = heads * cache.shape[-1]
    attention.plan(cache, step, heads=heads, window=0, scale=cache.shape[-1] ** -0.5, isa=isa)
    q = torch.randn(rows.count, width, generator=torch.Generator().manual_seed(1)).to(cache.dtype)
    out = torch.empty(rows.count, width)

    def call() -> None:
        for layer in range(cache.shape[1]):
            attention(layer, q, out)

    return call, out


def torch_path(
    cache: PagedKVCache, table: np.ndarray, rows: Rows, heads: int
) -> tuple[Callable[[], None], torch.Tensor]:
    """A tree, which is a chain here, as a chunk."""
    shape = cache.shape
    kernel = native_row_kernel(cache, heads, shape.head_dim**-0.5, chunks=True)
    assert kernel is not None
    pieces = table.astype(np.int64) * 2 * shape.num_layers
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows.count, heads * shape.head_dim, generator=generator).to(shape.dtype)
    queries = q.view(rows.count, heads, shape.head_dim)
    out = torch.empty(rows.count, heads, shape.head_dim, dtype=shape.dtype)
    if rows.count == 1:
        row_plan = kernel.plan(np.array([rows.start + 1]), pieces.reshape(1, -1), None)

        def call() -> None:
            for layer in range(shape.num_layers):
                out.copy_(kernel.attend(row_plan, layer, queries))
    else:
        plan = kernel.plan_chunk(rows.start, rows.count, pieces, None)

        def call() -> None:
            for layer in range(shape.num_layers):
                out.copy_(kernel.attend_chunk(plan, layer, queries))

    return call, out


def measure(
    library: ctypes.CDLL, shape: Shape, rows: Rows, layers: int, isa: int
) -> dict[str, Any]:
    columns = -(-(rows.start + rows.count) // BLOCK_SIZE)
    cache = PagedKVCache(
        KVCacheShape(layers, shape.kv_heads, shape.dim, BLOCK_SIZE, torch.bfloat16),
        columns,
        torch.device("cpu"),
    )
    cache.data.normal_()
    table = np.random.default_rng(0).permutation(columns)
    data = cache.data.view(columns, layers, 2, BLOCK_SIZE, shape.kv_heads, shape.dim)
    new, new_out = ours(library, data, table, rows, shape.heads, isa)
    old, old_out = torch_path(cache, table, rows, shape.heads)
    best = best_seconds([new, old], ROUNDS, clock=time.thread_time)
    new_s, old_s = (seconds / layers for seconds in best)
    if rows.count == 1:
        unit, work = "GB/s", (rows.start + 1) * shape.kv_heads * shape.dim * 4 / 1e9
    else:
        unit, work = "GFLOP/s", rows.pairs * shape.heads * shape.dim * 4 / 1e9
    difference = (new_out.view(-1) - old_out.float().view(-1)).abs().max().item()
    return {
        "level": native.ISA_NAMES[isa],
        "heads": f"{shape.heads}/{shape.kv_heads}x{shape.dim}",
        "kind": rows.kind,
        "start": rows.start,
        "rows": rows.count,
        "us": new_s * 1e6,
        "torch path us": old_s * 1e6,
        "ours": work / new_s,
        "torch path": work / old_s,
        "unit": unit,
        "speed-up": old_s / new_s,
        "difference": difference,
    }


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--levels", nargs="+", choices=native.ISA_NAMES)
    args = parser.parse_args()
    library = native.load()
    if library is None:
        raise SystemExit("there is no compiler")
    torch.set_num_threads(1)
    levels = [native.ISA_NAMES.index(name) for name in args.levels or ()]
    table = [
        measure(library, shape, rows, args.layers, isa)
        for isa in levels or [native.isa_level(library)]
        for shape in SHAPES
        for rows in WORK
    ]
    report("kernels_cpu_attention", {"layers": args.layers}, table, args.out)


if __name__ == "__main__":
    main()
