"""Norms, activations, rotary embedding with KV store, KV compaction beside torch, on the device;
norms and gates that write rows in 8 bits beside the same and then a pass of its own (`torch_us`).

Kernel-only figures, each call's share of a CUDA graph of many. Shapes of Llama-3.1-8B, bfloat16.
Few rows: inputs lie in the L2 cache, as after the product before them; many rows: the buffers
take turns and are larger than it. The floor is the bytes moved at copy speed (4.14 TB/s).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.common import Rows, bench_parser, report
from bench.gpu_timing import call_us
from bench.kernels.quantized_gemm import FORMS, random_matrix
from hetero_llm.gpu.kernels.activation import activation, silu_mul
from hetero_llm.gpu.kernels.compact_kv import compact_kv
from hetero_llm.gpu.kernels.norm import (
    add_gemma_rms_norm,
    add_layer_norm,
    add_rms_norm,
    quantized_rms_norm,
)
from hetero_llm.gpu.kernels.quantize_rows import quantize_gated, quantize_rows
from hetero_llm.gpu.kernels.rope_store import rope_store, store
from hetero_llm.models import layers
from hetero_llm.models.rotary import apply_rotary

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, BLOCK = 4096, 14336, 32, 8, 128, 32, 16
MAX_LEN = 16384
COPY_BYTES_PER_US = 4.14e6
L2_BYTES = 60 << 20
FEW, MANY = (1, 8, 128, 512), 16384

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def microseconds(calls: Sequence[Callable[[], Any]], graph_calls: int) -> float:
    """Median time of one call in a graph of `graph_calls`, which take turns."""
    for call in calls:
        call()
    turns = itertools.cycle(calls)
    return call_us(lambda: next(turns)(), graph_calls)


def row(name: str, rows: int, bytes_: int, ours: Any, plain: Any, make: Any) -> dict[str, Any]:
    """Times `ours(*data)` and `plain(*data)` on as many `data = make()` as outgrow the L2 cache.

    Args:
        bytes_: Read and written by one call.
    """
    few = rows < MANY
    sets = [make() for _ in range(2 if few else 1 + L2_BYTES // bytes_ + 1)]
    calls = 100 if few else 12
    result = {"kernel": name, "rows": rows}
    for key, function in (("torch_us", plain), ("ours_us", ours)):
        each = [lambda f=function, data=data: f(*data) for data in sets]
        result[key] = microseconds(each, calls)
    return result | {"floor_us": bytes_ / COPY_BYTES_PER_US}


def norm_rows() -> Rows:
    def make(rows: int, parameters: int) -> tuple[Any, ...]:
        x, residual = torch.randn(2, rows, HIDDEN, device=DEVICE, dtype=BF16)
        return x, residual, *torch.randn(parameters, HIDDEN, device=DEVICE, dtype=BF16), 1e-5

    return [
        row(f"add + {name}", rows, 8 * rows * HIDDEN, ours, plain,
            lambda rows=rows, parameters=parameters: make(rows, parameters))
        for name, parameters, ours, plain, counts in (
            ("RMS norm", 1, add_rms_norm, layers.add_rms_norm, (*FEW, MANY)),
            ("Gemma's norm", 1, add_gemma_rms_norm, layers.add_gemma_rms_norm, (1, 128, MANY)),
        )
        for rows in counts
    ]  # fmt: skip


def layer_norm_rows() -> Rows:
    """Also as in layers whose attention and MLP run side by side: the outputs of both are added,
    and each has a norm of its own or not."""

    def make(rows: int, has_extra: bool, norms: int) -> tuple[Any, ...]:
        x, residual, extra = torch.randn(3, rows, HIDDEN, device=DEVICE, dtype=BF16)
        affines = [tuple(pair) for pair in torch.randn(norms, 2, HIDDEN, device=DEVICE, dtype=BF16)]
        return x, residual, extra if has_extra else None, affines, 1e-5

    return [
        row(name, rows,
            2 * (3 + has_extra + norms) * rows * HIDDEN, add_layer_norm, layers.add_layer_norm,
            lambda rows=rows, has_extra=has_extra, norms=norms: make(rows, has_extra, norms))
        for name, has_extra, norms in (
            ("add + layer norm", False, 1),
            ("two adds + layer norm", True, 1),
            ("two adds + two layer norms", True, 2),
        )
        for rows in (1, 128, MANY)
    ]  # fmt: skip


def gate_rows() -> Rows:
    def make(rows: int) -> tuple[Any, ...]:
        return (torch.randn(rows, 2 * INNER, device=DEVICE, dtype=BF16),)

    plain = layers.GatedActivation("silu").plain
    return [
        row("SiLU(gate) * up", rows, 6 * rows * INNER, silu_mul, plain,
            lambda rows=rows: make(rows))
        for rows in (*FEW, MANY)
    ]  # fmt: skip


def quantized_rows() -> Rows:
    """Rows in 8 bits of a norm and of a gate."""

    def of_norm(rows: int) -> tuple[Any, ...]:
        x, residual = torch.randn(2, rows, HIDDEN, device=DEVICE, dtype=BF16)
        return x, residual, torch.randn(HIDDEN, device=DEVICE, dtype=BF16), 1e-5

    table = []
    for form in ("fp8", "fp8_block", "int8"):
        norms, gates = (random_matrix(FORMS[form], 128, k) for k in (HIDDEN, INNER))
        for rows in (128, 1024, MANY):
            table += [
                row(f"add + RMS norm, {form} rows", rows, 7 * rows * HIDDEN,
                    lambda *a, m=norms: quantized_rms_norm(*a, matrix=m, gemma=False),
                    lambda *a, m=norms: quantize_rows(add_rms_norm(*a)[0], m),
                    lambda rows=rows: of_norm(rows)),
                row(f"SiLU(gate) * up, {form} rows", rows, 5 * rows * INNER,
                    lambda x, m=gates: quantize_gated(x, "silu", m),
                    lambda x, m=gates: quantize_rows(silu_mul(x), m),
                    lambda rows=rows: (torch.randn(rows, 2 * INNER, device=DEVICE, dtype=BF16),)),
            ]  # fmt: skip
    return table


def activation_rows() -> Rows:
    """MLPs without a gate."""
    inner = INNER * 3 // 2

    def make(rows: int) -> tuple[Any, ...]:
        return (torch.randn(rows, inner, device=DEVICE, dtype=BF16),)

    return [
        row(name, rows, 4 * rows * inner, lambda x, name=name: activation(x, name),
            layers.Activation(name), lambda rows=rows: make(rows))
        for name in ("gelu", "gelu_new", "relu2")
        for rows in (1, 128, MANY)
    ]  # fmt: skip


def make_cache(rows: int, dtype: torch.dtype, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's K and V of a block-first cache of 4 layers, and random slots of all rows."""
    blocks = -(-rows // BLOCK) + 64
    cache = torch.zeros(blocks, 4, 2, BLOCK, kv_heads, DIM, device=DEVICE, dtype=dtype)
    return cache[:, 1], torch.randperm(blocks * BLOCK, device=DEVICE)[:rows]


def rope_rows(name: str, cache_dtype: torch.dtype, qk_norm: bool, counts: tuple[int, ...]) -> Any:
    table = torch.randn(MAX_LEN, DIM, device=DEVICE)
    weights = torch.randn(2, DIM, device=DEVICE, dtype=BF16) if qk_norm else (None, None)
    width = (HEADS + 2 * KV_HEADS) * DIM

    def make(rows: int) -> tuple[Any, ...]:
        qkv = torch.randn(rows, width, device=DEVICE, dtype=BF16)
        positions = torch.randint(0, MAX_LEN, (rows,), device=DEVICE, dtype=torch.int32)
        return (qkv, positions, *make_cache(rows, cache_dtype, KV_HEADS))

    def ours(qkv: Any, positions: Any, cache: Any, slots: Any) -> None:
        rope_store(qkv, positions, slots, table, *weights, 1e-6, cache[:, 0], cache[:, 1], HEADS)

    def plain(qkv: Any, positions: Any, cache: Any, slots: Any) -> None:
        """Table look-up, rotation and store; the norm, where there is one, in two more calls."""
        heads = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)
        qk, v = heads.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
        if qk_norm:
            qk = layers.rms_norm(qk, weights[0], 1e-6)
        cos, sin = table[positions].to(BF16).unsqueeze(1).chunk(2, dim=-1)
        turned = apply_rotary(qk, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        k = turned[:, HEADS:]
        block, offset = slots // BLOCK, slots % BLOCK
        if cache.dtype.itemsize == 1:
            k, v = (x.to(cache.dtype).view(torch.uint8) for x in (k, v))
            cache = cache.view(torch.uint8)
        cache[:, 0][block, offset] = k
        cache[:, 1][block, offset] = v

    bytes_per_row = 2 * width + 2 * HEADS * DIM + 2 * KV_HEADS * DIM * cache_dtype.itemsize
    return [
        row(name, rows, rows * (bytes_per_row + 4 * DIM), ours, plain, lambda rows=rows: make(rows))
        for rows in counts
    ]


def store_rows() -> Rows:
    """OPT-6.7b: as many KV heads as query heads."""

    def make(rows: int) -> tuple[Any, ...]:
        qkv = torch.randn(rows, 3, HEADS, DIM, device=DEVICE, dtype=BF16)
        return (qkv[:, 1], qkv[:, 2], *make_cache(rows, BF16, HEADS))

    def ours(k: Any, v: Any, cache: Any, slots: Any) -> None:
        store(k, v, slots, cache[:, 0], cache[:, 1])

    def plain(k: Any, v: Any, cache: Any, slots: Any) -> None:
        block, offset = slots // BLOCK, slots % BLOCK
        cache[:, 0][block, offset] = k
        cache[:, 1][block, offset] = v

    return [
        row("store, 32 KV heads", rows, 8 * rows * HEADS * DIM, ours, plain,
            lambda rows=rows: make(rows))
        for rows in (1, 128, MANY)
    ]  # fmt: skip


def compact_rows() -> Rows:
    """Accepted paths of trees of 16 nodes, 4 moves each; then nothing to move at all."""

    def make(sequences: int, moves: int) -> tuple[Any, ...]:
        shape = (2 * sequences, LAYERS, 2, BLOCK, KV_HEADS, DIM)
        cache = torch.zeros(shape, device=DEVICE, dtype=BF16)
        base = torch.arange(sequences, device=DEVICE)[:, None] * 2 * BLOCK + 8
        path = torch.arange(16, device=DEVICE)[None]
        counts = torch.full((sequences,), moves, dtype=torch.int32, device=DEVICE)
        return cache, base + 2 * path, base + path, counts

    def plain(cache: Any, sources: Any, destinations: Any, counts: Any) -> None:
        source, target = sources[:, 1:5].flatten(), destinations[:, 1:5].flatten()
        kv = cache[source // BLOCK, :, :, source % BLOCK]
        cache[target // BLOCK, :, :, target % BLOCK] = kv

    # Node 0 stays, so 5 nodes are 4 moves.
    bytes_per_move = 2 * LAYERS * 2 * KV_HEADS * DIM * 2
    return [
        row(f"compaction, {max(moves - 1, 0)} moves", sequences,
            sequences * max(moves - 1, 0) * bytes_per_move, compact_kv, plain,
            lambda sequences=sequences, moves=moves: make(sequences, moves))
        for sequences, moves in ((1, 5), (8, 5), (64, 5), (64, 0))
    ]  # fmt: skip


def main() -> None:
    args = bench_parser(__doc__).parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        table = [
            *norm_rows(),
            *layer_norm_rows(),
            *gate_rows(),
            *quantized_rows(),
            *activation_rows(),
            *rope_rows("rope + store", BF16, False, (*FEW, MANY)),
            *rope_rows("rope + store, fp8 cache", torch.float8_e4m3fn, False, (1, MANY)),
            *rope_rows("q/k norm + rope + store", BF16, True, (1, MANY)),
            *store_rows(),
            *compact_rows(),
        ]
    report("kernels_elementwise", {}, table, args.out)


if __name__ == "__main__":
    main()
