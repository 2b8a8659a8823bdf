"""Paged attention alone on a CUDA device: KV layouts, tile shapes, contexts, trees.

    python -m bench.kernels.attention [--parts layouts,tiles,...] [--out FILE]

Shape of one Llama-3.1-8B layer unless a row of the table says otherwise: 32 query heads, 8 KV heads
of 128, bf16. Every figure is a captured graph over `LAYERS` layers with K and V of their own, in
random blocks. Bandwidth is the bytes of K and V over the time, compared with that of a large copy
(bytes read plus bytes written).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import Rows, bench_parser, names_of, print_table, write_results
from bench.gpu_timing import copy_bandwidth, event_ms, graph_ms
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.attention_plan import PlanLimits, plan_work
from hetero_llm.gpu.kernels.launch import num_multiprocessors
from hetero_llm.gpu.kernels.paged_attention import (
    RowMasks,
    TileShape,
    Work,
    make_workspace,
    paged_attention,
)

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 6
GROUP = HEADS // KV_HEADS
DEVICE = torch.device("cuda")
LAYOUTS = (
    "block-first token-major",
    "block-first head-major",
    "slabs token-major",
    "slabs head-major",
)
DEFAULT = TileShape(16, 128, 4, 3, 2)


@dataclass(frozen=True)
class Heads:
    """What one layer attends with. alibi: with a slope for each query head."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    softcap: float | None = None
    alibi: bool = False


LLAMA = Heads()


@dataclass
class Cache:
    """K and V views [blocks, BLOCK, KV_HEADS, DIM] of each layer."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_cache(
    layout: str, blocks: int, dtype: torch.dtype = torch.bfloat16, of: Heads = LLAMA
) -> Cache:
    head_major = "head-major" in layout
    inner = (of.kv_heads, BLOCK, of.dim) if head_major else (BLOCK, of.kv_heads, of.dim)
    sizes = (blocks, LAYERS, 2, *inner) if "block" in layout else (LAYERS, 2, blocks, *inner)
    data = torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE).normal_().to(dtype)
    if "block" in layout:
        data = data.permute(1, 2, 0, 3, 4, 5)
    if "head-major" in layout:
        data = data.transpose(3, 4)
    return Cache([data[i, 0] for i in range(LAYERS)], [data[i, 1] for i in range(LAYERS)])


def attention_ms(
    cache: Cache,
    batch: int,
    context: int,
    tile: TileShape,
    nodes: int = 1,
    tree: bool = False,
    of: Heads = LLAMA,
    shared: int = 0,
    together: bool = True,
) -> float:
    """Milliseconds of one layer: `batch` sequences of `nodes` rows, `context` keys in all.

    shared: keys at the beginning that are in the same blocks for all. together: the plan may read
    them once for several sequences.
    """
    rng = np.random.default_rng(0)
    per_sequence = -(-context // BLOCK)
    blocks = cache.keys[0].shape[0]
    assert batch * per_sequence <= blocks
    tables = rng.permutation(blocks)[: batch * per_sequence].reshape(batch, -1).astype(np.int32)
    tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK]
    starts = np.full(batch, context - nodes, np.int32)
    counts = np.full(batch, nodes, np.int32)
    slots = np.arange(batch, dtype=np.int32)
    parallel = num_multiprocessors(DEVICE) * tile.programs // of.kv_heads
    limits = PlanLimits(
        tile.rows * of.kv_heads // of.heads, tile.keys, parallel, 4 * parallel, 2 * tile.keys
    )
    items, cut_rows = plan_work(
        slots, starts, counts, np.ones(batch, bool) if tree else None, None, limits,
        tables if together else None, BLOCK,
    )  # fmt: skip
    rows = batch * nodes
    position = np.repeat(starts, counts) + np.tile(np.arange(nodes), batch)
    seen = np.repeat(starts, counts) if tree else position + 1
    chain = torch.tensor([(2 << min(i, 61)) - 1 for i in range(nodes)]).repeat(batch)
    masks = RowMasks(
        torch.from_numpy(seen.astype(np.int32)).to(DEVICE),
        torch.from_numpy(position.astype(np.int32)).to(DEVICE),
        chain.to(DEVICE) if tree else None,
    )
    work = Work(
        torch.from_numpy(items).to(DEVICE),
        torch.from_numpy(cut_rows).to(DEVICE),
        torch.tensor([len(items), len(cut_rows)], dtype=torch.int32, device=DEVICE),
    )
    workspace = make_workspace(4 * parallel, of.kv_heads, tile.rows, of.dim, DEVICE)
    slopes = torch.rand(of.heads, device=DEVICE) if of.alibi else None
    q = torch.randn(rows, of.heads, of.dim, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)
    device_tables = torch.from_numpy(tables).to(DEVICE)

    def body() -> None:
        for keys, values in zip(cache.keys, cache.values, strict=True):
            paged_attention(
                q, keys, values, device_tables, masks, work, workspace, tile,
                scale=of.dim**-0.5, softcap=of.softcap, slopes=slopes, out=out,
            )  # fmt: skip

    return graph_ms(body) / LAYERS


def bandwidth(batch: int, context: int, ms: float, of: Heads = LLAMA) -> float:
    """TB/s of bf16 K and V."""
    return batch * context * of.kv_heads * of.dim * 4 / ms / 1e9


def layouts(copy: float) -> Rows:
    """The four arms at batch 32 x 8K."""
    rows = []
    for layout in LAYOUTS:
        cache = make_cache(layout, 32 * 8192 // BLOCK)
        row: dict[str, Any] = {"layout": layout}
        for tile in (DEFAULT, TileShape(16, 64, 4, 4, 3), TileShape(16, 128, 4, 3, 2)):
            ms = attention_ms(cache, 32, 8192, tile)
            name = f"{tile.keys}k/{tile.num_stages}st/{tile.programs}p"
            row[f"{name} us"] = ms * 1e3
            row[f"{name} of copy"] = bandwidth(32, 8192, ms) / copy
        rows.append(row)
        del cache
        torch.cuda.empty_cache()
    return rows


def tiles(copy: float) -> Rows:
    """Compile choices for decode rows, block-first token-major."""
    cache = make_cache(LAYOUTS[0], 32 * 8192 // BLOCK)
    rows = []
    for keys, warps, stages, programs in (
        *((128, 4, 3, 2), (128, 4, 5, 1), (64, 4, 4, 3), (64, 2, 4, 4)),
        *((32, 2, 5, 5), (32, 4, 5, 4)),
    ):
        tile = TileShape(16, keys, warps, stages, programs)
        row: dict[str, Any] = {"keys/warps/stages/programs": f"{keys}/{warps}/{stages}/{programs}"}
        for batch, context in (
            *((32, 8192), (1, 32768), (1, 4096), (1, 192)),
            *((32, 192), (64, 1088), (128, 192)),
        ):
            ms = attention_ms(cache, batch, context, tile)
            row[f"{batch}x{context} us"] = ms * 1e3
            if batch * context >= 32768:
                row[f"{batch}x{context} of copy"] = bandwidth(batch, context, ms) / copy
        rows.append(row)
    return rows


def trees(_: float) -> Rows:
    """T(n rows) / T(1 row) at a context of 4K."""
    cache = make_cache(LAYOUTS[0], 32 * 4096 // BLOCK)
    rows = []
    for batch in (1, 8, 32):
        alone = attention_ms(cache, batch, 4096, DEFAULT)
        row: dict[str, Any] = {"batch": batch, "1 row us": alone * 1e3}
        for nodes, tile in (
            (4, DEFAULT),
            (8, TileShape(32, 128, 4, 3, 2)),
            (8, TileShape(32, 128, 4, 5, 1)),
            (8, TileShape(32, 64, 4, 5, 2)),
            (8, TileShape(32, 64, 4, 4, 3)),
            (16, TileShape(64, 64, 4, 3, 2)),
            (16, TileShape(32, 128, 4, 3, 2)),
            (32, TileShape(64, 64, 4, 3, 2)),
        ):
            ms = attention_ms(cache, batch, 4096, tile, nodes, tree=True)
            row[f"{nodes}r {tile.rows}/{tile.keys}/{tile.num_warps}/{tile.num_stages}"] = ms / alone
        rows.append(row)
    return rows


def shared(_: float) -> Rows:
    """Sequences on one prefix of 10K keys, and 64 keys of their own: microseconds with a copy of it
    for each, with the same blocks read by each, and read once for several."""
    prefix = 10240
    context = prefix + 64
    cache = make_cache(LAYOUTS[0], 50 * (context // BLOCK))
    rows = []
    for batch, nodes, tile in (
        (50, 8, TileShape(64, 64, 4, 3, 2)),
        (50, 8, TileShape(128, 64, 8, 3, 1)),
        (50, 8, TileShape(32, 64, 4, 5, 2)),
        (32, 8, TileShape(64, 64, 4, 3, 2)),
        (8, 8, TileShape(32, 128, 4, 3, 2)),
        (50, 1, DEFAULT),
        (32, 1, DEFAULT),
        (32, 1, TileShape(64, 64, 4, 3, 2)),
        (8, 1, TileShape(16, 128, 4, 5, 1)),
    ):
        own = attention_ms(cache, batch, context, tile, nodes)
        each = attention_ms(cache, batch, context, tile, nodes, shared=prefix, together=False)
        once = attention_ms(cache, batch, context, tile, nodes, shared=prefix)
        rows.append(
            {
                "sequences x rows": f"{batch} x {nodes}",
                "tile": f"{tile.rows}/{tile.keys}/{tile.num_warps}/{tile.num_stages}",
                "own blocks us": own * 1e3,
                "shared, read by each us": each * 1e3,
                "shared, read together us": once * 1e3,
                "own / together": own / once,
            }
        )
    return rows


def variants(copy: float) -> Rows:
    """Other families' heads and scores, with the tiles that the engine gives them."""
    rows = []
    for name, of in (
        ("Llama-3.1-8B", LLAMA),
        ("the same with a soft cap", Heads(softcap=50.0)),
        ("the same with ALiBi", Heads(alibi=True)),
        ("Bloom-7B1, ALiBi", Heads(32, 32, 128, alibi=True)),
        ("Gemma-2-9B, soft cap", Heads(16, 8, 256, softcap=50.0)),
        ("Phi-2, heads of 80", Heads(32, 32, 80)),
        ("Falcon-7B, 71 heads on one", Heads(71, 1, 64)),
        ("StarCoder, 48 heads on one", Heads(48, 1, 128)),
    ):
        config: Any = SimpleNamespace(
            num_heads=of.heads, num_kv_heads=of.kv_heads, head_dim=of.dim, num_layers=0,
            sliding_windows=(), alibi_slopes=None,
        )  # fmt: skip
        cache: Any = SimpleNamespace()
        tables = torch.zeros(1, 1, device=DEVICE)
        context = AttentionContext(config, cache, tables, torch.bfloat16)
        cache = make_cache(LAYOUTS[0], 32 * 4096 // BLOCK, of=of)
        row: dict[str, Any] = {"heads": name}
        for batch in (1, 32):
            ms = attention_ms(cache, batch, 4096, context.decode_tile(batch, short=False), of=of)
            row[f"{batch} x 4K us"] = ms * 1e3
            row[f"{batch} x 4K of copy"] = bandwidth(batch, 4096, ms, of) / copy
        for nodes in (8, 64):
            tile = context.tree_tile(nodes, short=False)
            ms = attention_ms(cache, 1, 4096, tile, nodes, tree=True, of=of)
            row[f"tree of {nodes} us"] = ms * 1e3
        ms = attention_ms(cache, 1, 4096, context.chunk_tile(4096), 4096, of=of)
        row["4K prompt TFLOP/s"] = 2 * 4096 * 4097 * of.heads * of.dim / ms / 1e9
        rows.append(row)
        del cache
        torch.cuda.empty_cache()
    return rows


def eight_bits(copy: float) -> Rows:
    """Caches in 8 bits beside bf16: e4m3 is read in pairs, e5m2 byte by byte."""
    rows = []
    config: Any = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, num_layers=0, sliding_windows=(),
        alibi_slopes=None,
    )  # fmt: skip
    cache: Any = SimpleNamespace()
    context = AttentionContext(config, cache, torch.zeros(1, 1, device=DEVICE), torch.bfloat16)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for batch, keys in ((1, 4096), (1, 32768), (8, 4096), (32, 8192), (128, 192), (128, 1024)):
        row: dict[str, Any] = {"context": f"{batch} x {keys}"}
        for dtype in dtypes:
            cache = make_cache(LAYOUTS[0], batch * keys // BLOCK, dtype)
            tile = context.decode_tile(batch, short=keys < 512)
            ms = attention_ms(cache, batch, keys, tile)
            name = str(dtype).removeprefix("torch.")
            row[f"{name} us"] = ms * 1e3
            row[f"{name} of copy"] = bandwidth(batch, keys, ms) * dtype.itemsize / 2 / copy
            del cache
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


def prefill(_: float) -> Rows:
    """Library attention on contiguous K and V against our kernel: TFLOP/s."""
    rows = []
    for count, start in ((512, 0), (1024, 0), (4096, 0), (16384, 0), (16384, 16384), (1024, 15360)):
        q = torch.randn(1, HEADS, count, DIM, dtype=torch.bfloat16, device=DEVICE)
        k, v = (
            torch.randn(1, KV_HEADS, start + count, DIM, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        )
        pairs = count * start + count * (count + 1) / 2
        flops = 4 * pairs * HEADS * DIM
        row: dict[str, Any] = {"rows": count, "before": start}
        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            for gqa in (True, False):
                row[f"{name}{' gqa' if gqa else ''}"] = _library(
                    backend, gqa, q, k, v, start, flops
                )
        if start == 0 and count <= 16384:
            cache = make_cache(LAYOUTS[0], count // BLOCK)
            for tile in (
                TileShape(64, 64, 4, 4, 2),
                TileShape(128, 64, 8, 4, 1),
                TileShape(128, 128, 8, 3, 1),
            ):
                ms = attention_ms(cache, 1, count, tile, count)
                row[f"ours {tile.rows}/{tile.keys}"] = flops / ms / 1e9
        rows.append(row)
    columns = dict.fromkeys(c for row in rows for c in row)
    return [{c: row.get(c, "-") for c in columns} for row in rows]


def _library(
    backend: SDPBackend,
    gqa: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    flops: float,
) -> float | str:
    """TFLOP/s of a chunk after `start` keys: the past without a mask, the chunk causal."""
    if not gqa:
        k, v = (t.repeat_interleave(GROUP, dim=1) for t in (k, v))

    def body() -> None:
        for low, high, causal in ((0, start, False), (start, k.shape[2], True)):
            if high > low:
                F.scaled_dot_product_attention(
                    q, k[:, :, low:high], v[:, :, low:high], is_causal=causal, enable_gqa=gqa
                )

    try:
        with sdpa_kernel(backend):
            body()
            return flops / event_ms(body, replays=5) / 1e9
    except RuntimeError as error:
        return str(error).splitlines()[0][:24]


PARTS = {
    part.__name__: part for part in (layouts, tiles, trees, shared, prefill, variants, eight_bits)
}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--parts", type=names_of(tuple(PARTS)), default=list(PARTS))
    args = parser.parse_args()
    copy = copy_bandwidth()
    results: dict[str, Any] = {"copy_tb_s": copy}
    print(f"copy {copy:.2f} TB/s")
    for part in args.parts:
        results[part] = PARTS[part](copy)
        print(f"\n{part}")
        print_table(results[part])
    write_results("attention", results, args.out)


if __name__ == "__main__":
    main()
