"""The compiled CPU kernels against their torch references, and packed against plain linear layers.

Shapes are those of the demo target in a decode batch of 16 and a prefill chunk of 1,024 rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import Rows, bench_parser, report
from hetero_llm.cpu import native
from hetero_llm.cpu.fused import _packed_product, native_add_rms_norm, native_silu_mul
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.models.layers import GatedActivation, Linear, add_rms_norm
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


def attention_row(
    name: str, starts: np.ndarray, counts: np.ndarray, repeats: int
) -> dict[str, Any]:
    """Six layers of attention of `counts` tokens behind `starts` cached ones, [sequences] each."""
    contexts = starts + counts
    columns = -(-contexts // BLOCK)
    tables = np.zeros((len(starts), columns.max()), np.int32)
    order = np.random.default_rng(0).permutation(int(columns.sum())).astype(np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(columns) - columns, columns, strict=True)):
        tables[row, :count] = order[first : first + count]
    shape = KVCacheShape(LAYERS, KV_HEADS, DIM, BLOCK, torch.bfloat16)
    cache = PagedKVCache(shape, len(order), torch.device("cpu"))
    cache.data.normal_()
    config = SimpleNamespace(
        sliding_windows=(None,) * LAYERS, num_kv_heads=KV_HEADS, attn_scale=DIM**-0.5,
        attn_softcap=None, alibi_slopes=None,
    )  # fmt: skip
    num_tokens = int(counts.sum())
    q = torch.randn(num_tokens, HEADS, DIM).bfloat16()
    kv = torch.randn(num_tokens, KV_HEADS, DIM).bfloat16()
    positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, contexts, strict=True)])
    blocks = tables[np.repeat(np.arange(len(starts)), counts), positions // BLOCK]
    times = []
    for kernel in (None, native_row_kernel(cache, HEADS, DIM**-0.5, chunks=True)):
        attention = TorchPagedAttention(config, cache, False, kernel)  # type: ignore[arg-type]

        def step(attention: TorchPagedAttention = attention) -> None:
            planned = attention.plan(starts, counts, tables, positions, blocks)
            for layer in range(LAYERS):
                planned(layer, q, kv, kv)

        times.append(microseconds(step, repeats))
    gigabytes = int(contexts.sum()) * 2 * KV_HEADS * DIM * 2 * LAYERS / 1e9
    return {"kernel": f"attention, {name}, {LAYERS} layers", "torch_us": times[0],
            "ours_us": times[1], "ours_GB_s": gigabytes / times[1] * 1e6}  # fmt: skip


def attention_rows() -> Rows:
    """Decode steps of 16 sequences of 128 to 1,088 tokens, then prefill chunks."""
    contexts = np.linspace(128, 1088, 16).astype(int)
    decode = attention_row("16 rows", contexts - 1, np.ones(16, int), 20)
    return [decode] + [
        attention_row(f"{rows} rows behind {start}", np.array([start]), np.array([rows]), 5)
        for rows, start in ((36, 932), (200, 0), (1024, 0))
    ]


def elementwise_rows(rows: int) -> Rows:
    library = native.load()
    assert library is not None
    x, residual = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, HIDDEN).bfloat16()
    weight = torch.randn(HIDDEN).bfloat16()
    fast_norm = native_add_rms_norm(library)
    gate = GatedActivation("silu")
    gate_up = torch.randn(rows, 2 * INNER).bfloat16()
    fast_gate = native_silu_mul(library, gate.plain)
    layer = Linear(HIDDEN, 2 * INNER, bias=False).bfloat16()
    torch.nn.init.normal_(layer.weight)
    projection, packed = layer.weight, _packed_product(layer)
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
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        table = [*attention_rows(), *elementwise_rows(16), *elementwise_rows(1024)]
    report("cpu_kernels", {"threads": args.threads}, table, args.out)


if __name__ == "__main__":
    main()
