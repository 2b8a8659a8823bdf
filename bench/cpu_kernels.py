"""The compiled CPU kernels against their torch references, and packed against plain linear layers.

Shapes are those of the demo target in a decode batch of 16 and a prefill chunk of 1,024 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import print_table, write_results
from hetero_llm.cpu import native
from hetero_llm.cpu.fused import _packed_product, native_add_rms_norm, native_silu_mul
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.models.layers import GatedActivation, add_rms_norm
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

LAYERS, KV_HEADS, HEADS, DIM, BLOCK = 6, 1, 4, 128, 16
HIDDEN, INNER = 320, 768


def microseconds(function: Callable[[], Any], repeats: int = 50) -> float:
    """Median of five means."""
    for _ in range(5):
        function()
    means = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        means.append((time.perf_counter() - begin) / repeats)
    return float(np.median(means)) * 1e6


def attention_row() -> dict[str, Any]:
    """Six layers of decode attention, 16 sequences of 128 to 1,088 tokens."""
    contexts = np.linspace(128, 1088, 16).astype(int)
    columns = -(-contexts // BLOCK)
    tables = np.zeros((16, columns.max()), np.int32)
    order = np.random.default_rng(0).permutation(int(columns.sum())).astype(np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(columns) - columns, columns, strict=True)):
        tables[row, :count] = order[first : first + count]
    shape = KVCacheShape(LAYERS, KV_HEADS, DIM, BLOCK, torch.bfloat16)
    cache = PagedKVCache(shape, len(order), torch.device("cpu"))
    cache.data.normal_()
    config = SimpleNamespace(
        sliding_windows=(None,) * LAYERS,
        num_kv_heads=KV_HEADS,
        attn_scale=DIM**-0.5,
        attn_softcap=None,
        alibi_slopes=None,
    )
    q = torch.randn(16, HEADS, DIM).bfloat16()
    kv = torch.randn(16, KV_HEADS, DIM).bfloat16()
    positions = contexts - 1
    blocks = tables[np.arange(16), positions // BLOCK]
    times = []
    for kernel in (None, native_row_kernel(cache, HEADS, DIM**-0.5, chunks=True)):
        attention = TorchPagedAttention(config, cache, False, kernel)  # type: ignore[arg-type]

        def step(attention: TorchPagedAttention = attention) -> None:
            planned = attention.plan(positions, np.ones(16, int), tables, positions, blocks)
            for layer in range(LAYERS):
                planned(layer, q, kv, kv)

        times.append(microseconds(step, 20))
    gigabytes = int(contexts.sum()) * 2 * KV_HEADS * DIM * 2 * LAYERS / 1e9
    return {"kernel": "attention, 16 rows, 6 layers", "torch_us": times[0], "ours_us": times[1],
            "ours_GB_s": gigabytes / times[1] * 1e6}  # fmt: skip


def chunk_row(rows: int, start: int) -> dict[str, Any]:
    """Six layers of attention of a prefill chunk behind `start` cached tokens."""
    table = np.random.default_rng(0).permutation(-(-(start + rows) // BLOCK)).astype(np.int32)
    shape = KVCacheShape(LAYERS, KV_HEADS, DIM, BLOCK, torch.bfloat16)
    cache = PagedKVCache(shape, len(table), torch.device("cpu"))
    cache.data.normal_()
    config = SimpleNamespace(
        sliding_windows=(None,) * LAYERS,
        num_kv_heads=KV_HEADS,
        attn_scale=DIM**-0.5,
        attn_softcap=None,
        alibi_slopes=None,
    )
    q = torch.randn(rows, HEADS, DIM).bfloat16()
    kv = torch.randn(rows, KV_HEADS, DIM).bfloat16()
    positions = np.arange(start, start + rows)
    starts, counts = np.array([start]), np.array([rows])
    times = []
    for kernel in (None, native_row_kernel(cache, HEADS, DIM**-0.5, chunks=True)):
        attention = TorchPagedAttention(config, cache, False, kernel)  # type: ignore[arg-type]

        def step(attention: TorchPagedAttention = attention) -> None:
            planned = attention.plan(
                starts, counts, table[None], positions, table[positions // BLOCK]
            )
            for layer in range(LAYERS):
                planned(layer, q, kv, kv)

        times.append(microseconds(step, 5))
    gigabytes = (start + rows) * 2 * KV_HEADS * DIM * 2 * LAYERS / 1e9
    return {"kernel": f"attention, {rows} rows behind {start}, 6 layers", "torch_us": times[0],
            "ours_us": times[1], "ours_GB_s": gigabytes / times[1] * 1e6}  # fmt: skip


def elementwise_rows(rows: int) -> list[dict[str, Any]]:
    library = native.load()
    assert library is not None
    x, residual = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, HIDDEN).bfloat16()
    weight = torch.randn(HIDDEN).bfloat16()
    fast_norm = native_add_rms_norm(library)
    gate = GatedActivation("silu")
    gate_up = torch.randn(rows, 2 * INNER).bfloat16()
    fast_gate = native_silu_mul(library, gate.plain)
    projection = torch.randn(2 * INNER, HIDDEN).bfloat16()
    packed = _packed_product(projection)
    pairs = {
        "add + RMS norm": (
            lambda: add_rms_norm(x, residual, weight, 1e-5),
            lambda: fast_norm(x, residual, weight, 1e-5),
            8 * rows * HIDDEN,
        ),
        "SiLU(gate) * up": (
            lambda: gate.plain(gate_up), lambda: fast_gate(gate_up), 6 * rows * INNER,
        ),
        "linear 320 -> 1536, packed": (
            lambda: F.linear(x, projection),
            lambda: packed(x, projection, None),
            2 * (projection.numel() + rows * (HIDDEN + 2 * INNER)),
        ),
    }  # fmt: skip
    table = []
    for name, (slow, fast, bytes_) in pairs.items():
        fast_us = microseconds(fast)
        table.append({"kernel": f"{name}, {rows} rows", "torch_us": microseconds(slow),
                      "ours_us": fast_us, "ours_GB_s": bytes_ / fast_us / 1e3})  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        chunks = [chunk_row(rows, start) for rows, start in ((36, 932), (200, 0), (1024, 0))]
        table = [attention_row(), *chunks, *elementwise_rows(16), *elementwise_rows(1024)]
    print_table(table)
    write_results("cpu_kernels", {"rows": table, "threads": args.threads}, args.out)


if __name__ == "__main__":
    main()
