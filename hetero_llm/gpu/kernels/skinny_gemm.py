"""Matrix products of few rows: y = x @ weight^T + bias at the speed at which weights are read.

A decode step reads every weight once for a handful of rows, so a product is as fast as its reads.
The kernels work on tiles of `BLOCK_N` output features:

- `vector_product_kernel`, one row: multiplies and sums in fp32 outside the tensor cores. A tile is
  loaded into registers as soon as the one before is summed, and many small programs per
  multiprocessor keep enough bytes in flight; the first tile is loaded before the wait for the
  previous kernel.
- `vector_rows_kernel`, the same for a few rows, as long as their arithmetic takes less time than
  the weights.
- `matrix_product_kernel`, up to 64 rows: the weight tile is the left operand of the tensor cores
  and the few rows are the right one ("swap AB"), so that only the rows' padding to 8 is wasted,
  with a software pipeline of asynchronous copies.

All may split K among programs. Partial sums in fp32 go to memory, and the program that arrives
last at a tile adds them up in the order of the splits, so a result does not depend on timing (the
merge of "stream-K" products, Osama et al. 2023, with the last program instead of the first).

Before the wait for the previous kernel (see `launch`), programs may also prefetch their first
weights into L2. So the previous kernel must not write the weights.

The first and the last may add the low-rank adapters of their rows: see `fused_lora`.

Wrapper `skinny_gemm`, reference `skinny_gemm_reference`; timed by `bench.kernels.skinny_gemm`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.fused_lora import (
    NOT_YET,
    FusedAdapters,
    Shrinking,
    add_to_row,
    add_to_rows,
    fits,
    kernel_arguments,
    look_for_row,
    num_shrinking,
    prepare_row,
    prepare_rows,
    shrink_row,
    shrink_rows,
    store_words,
    take_words,
)
from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    INTERPRETED,
    Launch,
    let_next_start,
    num_multiprocessors,
    pdl_options,
    wait_and_release,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.lora import LoraSlots

MAX_ROWS = 64
"""Products of more rows go to the library."""

_DTYPES = (torch.bfloat16, torch.float16)
MAX_TILES = 1 << 16  # tiles of a product with split K: the length of the counters
MAX_WORDS = 1 << 22  # sums that programs wait for in a product
_SHARED_BYTES = 227 << 10  # of a multiprocessor from sm_90 on
# Of a thread of the vector kernel with adapters, by features: those that it takes without, so that
# as many programs run at once. The compiler would take 79, but needs no local memory with 72.
_MOST_REGISTERS = {8: 72}
_GROUP = 8  # elements of 16 bits in one 16-byte load


@dataclasses.dataclass(frozen=True)
class SkinnyConfig:
    """How one product is launched; sizes in elements.

    Attributes:
        block_m: Rows padded to this; 1: the vector kernel.
        block_n: Output features of a program.
        block_k: Inputs read at a time.
        split_k: Programs that share one tile of features.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline through shared memory; 1 of the vector kernel, which holds
            its tiles in registers.
        prefetch: Weights of each feature that are brought into L2 before the wait, behind those
            that are loaded there; 0: none. A power of two from 64 on.
        evict_first: Weights are the first to leave L2.
        waits: With split K the last share's program waits for the others' sums, instead of the last
            program to arrive merging all.
        vector: Several rows go through the vector kernel.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 1
    prefetch: int = 0
    evict_first: bool = True
    waits: bool = False
    vector: bool = False

    @property
    def loads_early(self) -> bool:
        """The vector kernel: the first tile is in registers before the wait."""
        return self.block_m == 1 or self.vector

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether an [m, k] x [n, k] product can be launched so."""
        last_share = k - steps_per_split(k, self) * self.block_k * (self.split_k - 1)
        loaded = self.block_k if self.loads_early else 0
        return (
            0 < m <= self.block_m
            and k % 16 == 0
            and not (self.loads_early and self.num_stages > 1)
            and last_share > 0
            and (self.prefetch == 0 or loaded + self.prefetch <= last_share)
            and (self.split_k == 1 or triton.cdiv(n, self.block_n) <= MAX_TILES)
            and (not self.waits or self.num_partials(n) <= MAX_WORDS)
        )

    def num_partials(self, n: int) -> int:
        """Sums of n features that programs hand over."""
        handed_over = self.split_k - (1 if self.waits else 0)
        return triton.cdiv(n, self.block_n) * handed_over * self.block_n * self.block_m


def steps_per_split(k: int, config: SkinnyConfig) -> int:
    return triton.cdiv(triton.cdiv(k, config.block_k), config.split_k)


@triton.jit
def load_weight(
    weight, features, columns, n, k, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT: tl.constexpr
):
    """[features, columns] of the weight [n, k]; zeros outside of it."""
    pointers = weight + features.to(tl.int64)[:, None] * k + columns[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        inside = (features < n)[:, None] & (columns < k)[None, :]
        return tl.load(pointers, mask=inside, other=0.0, eviction_policy=EVICT)


@triton.jit
def prefetch_weight(weight, features, start, n, k, PIECES: tl.constexpr, PREFETCH: tl.constexpr):
    """Brings weight[features, start : start + PREFETCH] into L2, one request per thread."""
    BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    offsets = tl.minimum(features, n - 1).to(tl.int64)[:, None] * k + start
    pieces = tl.arange(0, PIECES) * (PREFETCH // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [weight + (offsets + pieces[None, :]), PREFETCH // PIECES * BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store_output(
    sums, y, bias, features, rows, m, n, lora, prepared, HAS_BIAS: tl.constexpr,
    ADAPTED: tl.constexpr,
):  # fmt: skip
    """y[rows, features] = sums [features, rows] + adapters + bias."""
    if ADAPTED is not None:
        sums = add_to_rows(sums, lora, prepared, features, rows, m, n, ADAPTED)
    if HAS_BIAS:
        sums += tl.load(bias + features, mask=features < n, other=0.0).to(tl.float32)[:, None]
    inside = (features < n)[:, None] & (rows < m)[None, :]
    pointers = y + rows.to(tl.int64)[None, :] * n + features[:, None]
    tl.store(pointers, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def finish_tile(
    sums, y, bias, partials, counters, features, rows, m, n, tile, lora, prepared,
    HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr, ADAPTED: tl.constexpr,
):  # fmt: skip
    """Writes `sums` [features, rows] of a tile to y; in a split product, the last program merges
    first. With ADAPTED it adds each row's adapter, see `fused_lora.add_to_rows`.

    Without counters, the last one is that of the last share. It reads the sums of the others, which
    `sums_to_await` holds, until all are there: no fence and no counter stands between them."""
    if SPLIT_K == 1:
        _store_output(
            *(sums, y, bias, features, rows, m, n, lora, prepared),
            *(HAS_BIAS, ADAPTED),
        )
    else:
        BLOCK_N: tl.constexpr = sums.shape[0]
        BLOCK_M: tl.constexpr = sums.shape[1]
        one = BLOCK_N * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        if counters is None:
            shares = partials + tile.to(tl.int64) * ((SPLIT_K - 1) * one) + inner
            if tl.program_id(1) < SPLIT_K - 1:
                store_words(shares + tl.program_id(1) * one, sums)
            else:
                merged = take_words(shares, one, SPLIT_K - 1) + sums
                _store_output(
                    *(merged, y, bias, features, rows, m, n, lora, prepared),
                    *(HAS_BIAS, ADAPTED),
                )
        else:
            shares = partials + tile.to(tl.int64) * (SPLIT_K * one) + inner
            tl.store(shares + tl.program_id(1) * one, sums)
            # All threads' stores come before the release of the one thread that counts.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == SPLIT_K - 1:
                merged = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for share in tl.static_range(SPLIT_K):
                    merged += tl.load(shares + share * one, cache_modifier=".cg")
                tl.store(counters + tile, 0)
                _store_output(
                    *(merged, y, bias, features, rows, m, n, lora, prepared),
                    *(HAS_BIAS, ADAPTED),
                )


@triton.jit
def unpack_pairs(pairs, DTYPE: tl.constexpr):
    """fp32 values of the even and of the odd neighbours, packed two by two in int32."""
    if tl.bfloat16 == DTYPE:
        even = (pairs << 16).to(tl.float32, bitcast=True)
        odd = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        even = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def add_products(sums, w, x, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """sums [BLOCK_N, PAIRS / 4] + products of w [BLOCK_N, PAIRS] and x [PAIRS], summed by eight.

    Eight neighbours lie in one thread; sums are added across threads once, at the end.
    """
    w_even, w_odd = unpack_pairs(w, DTYPE)
    x_even, x_odd = unpack_pairs(x, DTYPE)
    products = w_even * x_even[None, :] + w_odd * x_odd[None, :]
    return sums + tl.sum(tl.reshape(products, (BLOCK_N, PAIRS // 4, 4)), axis=2)


@triton.jit
def load_row(x, columns, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x + columns, eviction_policy="evict_last")
    else:
        return tl.load(x + columns, mask=columns < k, other=0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["steps"])
def vector_product_kernel(
    x,  # [1, k / 2] int32: pairs of neighbours
    weight,  # [n, k / 2] int32
    bias,  # [n] or None
    y,  # [1, n], the dtype of the product
    partials,  # [tiles, SPLIT_K, BLOCK_N] fp32, or `sums_to_await`, or None
    counters,  # [tiles] int32, zero between launches, or None
    lora,  # of fused_lora.kernel_arguments, then SPLIT_K is 1; or None
    n,
    k_pairs,  # k / 2
    steps,  # tiles of K of one split
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIECES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
    ADAPTED: tl.constexpr = None,  # fused_lora.AdapterShape; None: without adapters
):
    """One row; grid (tiles of N, SPLIT_K), the shrinking programs first. Every split has at least
    one tile of K.

    Values come in pairs, as int32: a tile of 16-bit values carried from one turn of the loop to the
    next takes a register for each value, and is unpacked, thus waited for, where it is loaded.
    BLOCK_K is 256 per warp, so that a thread meets the same eight inputs in every feature.
    """
    tl.static_assert(ADAPTED is None or SPLIT_K == 1)
    shrinking = num_shrinking(lora, ADAPTED)
    if ADAPTED is not None and tl.program_id(0) < shrinking:
        shrink_row(lora, ADAPTED, PDL)
    else:
        tile = tl.program_id(0) - shrinking
        PAIRS: tl.constexpr = BLOCK_K // 2
        DTYPE: tl.constexpr = y.dtype.element_ty
        features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        start = tl.program_id(1) * steps * PAIRS
        stop = tl.minimum(k_pairs, start + steps * PAIRS)
        columns = start + tl.arange(0, PAIRS)
        sums = tl.zeros((BLOCK_N, PAIRS // 4), tl.float32)
        w = load_weight(weight, features, columns, n, k_pairs, EVEN_N, EVEN_K, EVICT)
        if ADAPTED is not None:
            prepared = prepare_row(lora, ADAPTED)
        if PREFETCH > 0:
            prefetch_weight(weight, features, start + PAIRS, n, k_pairs, PIECES, PREFETCH // 2)
        wait_and_release(PDL)
        row = load_row(x, columns, k_pairs, EVEN_K)
        for _ in tl.range(start + PAIRS, stop, PAIRS, num_stages=1):
            sums = add_products(sums, w, row, BLOCK_N, PAIRS, DTYPE)
            columns += PAIRS
            w = load_weight(weight, features, columns, n, k_pairs, EVEN_N, EVEN_K, EVICT)
            row = load_row(x, columns, k_pairs, EVEN_K)
        if ADAPTED is not None:
            found = look_for_row(lora, prepared, tile, n, ADAPTED, BLOCK_N, PAIRS // 4, EVEN_N)
        sums = add_products(sums, w, row, BLOCK_N, PAIRS, DTYPE)
        if ADAPTED is not None:
            sums = add_to_row(sums, found)
        sums = tl.sum(sums, axis=1)[:, None]
        rows = tl.arange(0, 1)
        finish_tile(
            *(sums, y, bias, partials, counters, features, rows, 1, n, tile, None, None),
            *(HAS_BIAS, SPLIT_K, None),
        )


@triton.jit
def _load_rows(x, columns, m, k, x_stride, ROWS: tl.constexpr, EVEN_K: tl.constexpr):
    """A tuple of ROWS rows of x [m, k], the last one in place of those that x does not have."""
    rows = ()
    for i in tl.static_range(ROWS):
        row = x + tl.minimum(i, m - 1).to(tl.int64) * x_stride
        rows = rows + (load_row(row, columns, k, EVEN_K),)
    return rows


@triton.jit
def _add_products_of_rows(
    sums, w, rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """`add_products` of each row; the compiler unpacks a weight once for all."""
    added = ()
    for i in tl.static_range(ROWS):
        added = added + (add_products(sums[i], w, rows[i], BLOCK_N, PAIRS, DTYPE),)
    return added


@triton.jit(do_not_specialize=["m", "steps"])
def vector_rows_kernel(
    x,  # [m, k / 2] int32: pairs of neighbours, rows x_stride apart
    weight,  # [n, k / 2] int32
    bias,  # [n] or None
    y,  # [m, n], the dtype of the product
    partials,  # as of `vector_product_kernel`, of BLOCK_M rows
    counters,
    m,
    n,
    k_pairs,  # k / 2
    x_stride,  # in pairs
    steps,  # tiles of K of one split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIECES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows, as `vector_product_kernel`; grid (tiles of N, SPLIT_K)."""
    PAIRS: tl.constexpr = BLOCK_K // 2
    DTYPE: tl.constexpr = y.dtype.element_ty
    tile = tl.program_id(0)
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * steps * PAIRS
    stop = tl.minimum(k_pairs, start + steps * PAIRS)
    columns = start + tl.arange(0, PAIRS)
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums = sums + (tl.zeros((BLOCK_N, PAIRS // 4), tl.float32),)
    w = load_weight(weight, features, columns, n, k_pairs, EVEN_N, EVEN_K, EVICT)
    if PREFETCH > 0:
        prefetch_weight(weight, features, start + PAIRS, n, k_pairs, PIECES, PREFETCH // 2)
    wait_and_release(PDL)
    inputs = _load_rows(x, columns, m, k_pairs, x_stride, BLOCK_M, EVEN_K)
    for _ in tl.range(start + PAIRS, stop, PAIRS, num_stages=1):
        sums = _add_products_of_rows(sums, w, inputs, BLOCK_M, BLOCK_N, PAIRS, DTYPE)
        columns += PAIRS
        w = load_weight(weight, features, columns, n, k_pairs, EVEN_N, EVEN_K, EVICT)
        inputs = _load_rows(x, columns, m, k_pairs, x_stride, BLOCK_M, EVEN_K)
    sums = _add_products_of_rows(sums, w, inputs, BLOCK_M, BLOCK_N, PAIRS, DTYPE)
    rows = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.static_range(BLOCK_M):
        total += tl.where((rows == i)[None, :], tl.sum(sums[i], axis=1)[:, None], 0.0)
    finish_tile(
        *(total, y, bias, partials, counters, features, rows, m, n, tile),
        *(None, None, HAS_BIAS, SPLIT_K, None),
    )


@triton.jit(do_not_specialize=["m", "steps"])
def matrix_product_kernel(
    x,  # [m, k], rows x_stride apart
    weight,  # [n, k]
    bias,  # [n] or None
    y,  # [m, n]
    partials,  # [tiles, SPLIT_K, BLOCK_M, BLOCK_N] fp32, or `sums_to_await`, or None
    counters,  # [tiles] int32, zero between launches, or None
    lora,  # of fused_lora.kernel_arguments, or None
    m,
    n,
    k,
    x_stride,
    steps,  # tiles of K of one split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIECES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
    ADAPTED: tl.constexpr = None,  # fused_lora.AdapterShape; None: without adapters
):
    """At most BLOCK_M rows; grid (tiles of N, SPLIT_K), the shrinking programs first. Every split
    has at least one tile of K."""
    shrinking = num_shrinking(lora, ADAPTED)
    if ADAPTED is not None and tl.program_id(0) < shrinking:
        shrink_rows(lora, m, ADAPTED, SPLIT_K, BLOCK_M, STAGES, PDL)
    else:
        tile = tl.program_id(0) - shrinking
        features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        start = tl.program_id(1) * steps * BLOCK_K
        stop = tl.minimum(k, start + steps * BLOCK_K)
        columns = start + tl.arange(0, BLOCK_K)
        rows = tl.arange(0, BLOCK_M)
        prepared = 0  # nothing
        if ADAPTED is not None:
            prepared = prepare_rows(lora, features, tile * BLOCK_N, rows, m, n, ADAPTED)
        if PREFETCH > 0:
            prefetch_weight(weight, features, start, n, k, PIECES, PREFETCH)
        wait_for_inputs(PDL)
        row_pointers = x + rows.to(tl.int64)[None, :] * x_stride
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for offset in tl.range(0, stop - start, BLOCK_K, num_stages=STAGES):
            inner = columns + offset
            w = load_weight(weight, features, inner, n, k, EVEN_N, EVEN_K, EVICT)
            inside = (rows < m)[None, :]
            if not EVEN_K:
                inside &= (inner < k)[:, None]
            right = tl.load(
                row_pointers + inner[:, None], mask=inside, other=0.0, eviction_policy="evict_last"
            )
            if IN_INTERPRETER:
                w, right = w.to(tl.float32), right.to(tl.float32)
            sums = tl.dot(w, right, sums)
        # Not earlier: the next kernel's programs would take shared memory from this one's.
        let_next_start(PDL)
        finish_tile(
            *(sums, y, bias, partials, counters, features, rows, m, n, tile, lora, prepared),
            *(HAS_BIAS, SPLIT_K, ADAPTED),
        )


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Arrivals at each tile of the product that runs now; each product leaves zeros behind."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a product once before capturing"
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def sums_to_await(device: torch.device) -> Tensor:
    """[MAX_WORDS] int32, through which the shares of a split product hand their sums to the program
    of the last share. All words are `NOT_YET` between launches: that program writes it back into
    each word that it has read."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a product once before capturing"
    return torch.full((MAX_WORDS,), NOT_YET.value, dtype=torch.int32, device=device)


def room_for_partials(
    n: int, config: SkinnyConfig, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """`partials` and `counters` of a product of n features."""
    if config.split_k == 1:
        return None, None
    if config.waits:
        return sums_to_await(device), None
    partials = torch.empty(config.num_partials(n), dtype=torch.float32, device=device)
    return partials, arrival_counters(device)


def tile_options(
    config: SkinnyConfig, n: int, bias: Tensor | None, device: torch.device
) -> dict[str, Any]:
    """Options of every launch of a product of n features; counts the launch (`pdl_options`)."""
    return {
        "BLOCK_N": config.block_n,
        "SPLIT_K": config.split_k,
        "EVEN_N": n % config.block_n == 0,
        "HAS_BIAS": bias is not None,
        "EVICT": "evict_first" if config.evict_first else "",
        "num_warps": config.num_warps,
        **pdl_options(device),
    }


def prefetch_options(config: SkinnyConfig, options: dict[str, Any], bits: int) -> dict[str, int]:
    """Which weights of `bits` bits are brought into L2: useful before a wait only, and from sm_90
    on. A thread asks for 128 bytes or more at once."""
    prefetch = config.prefetch if options["PDL"] else 0
    pieces = max(1, min(32 * config.num_warps // config.block_n, prefetch * bits // 1024))
    return {"PREFETCH": prefetch, "PIECES": 1 << (pieces.bit_length() - 1)}


def plan_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    y: Tensor,
    config: SkinnyConfig,
    adapters: FusedAdapters | None = None,
) -> Launch:
    """The launch that writes x @ weight^T + bias into `y`; see `skinny_gemm` for the shapes."""
    (m, k), n = x.shape, weight.shape[0]
    assert config.fits(m, n, k), f"{config} does not fit m={m}, n={n}, k={k}"
    tiles = triton.cdiv(n, config.block_n)
    partials, counters = room_for_partials(n, config, x.device)
    steps = steps_per_split(k, config)
    options = tile_options(config, n, bias, x.device)
    options |= prefetch_options(config, options, 16)
    options |= {"BLOCK_K": config.block_k, "EVEN_K": k % config.block_k == 0}
    lora = None
    if adapters is not None:
        assert fuses(config, adapters.weights), f"{config} does not fit the adapters"
        shrinking = shrinking_programs(config, m, adapters.weights)
        more, lora, adapted = kernel_arguments(x, adapters, shrinking, config.split_k)
        tiles += more
        options |= adapted
        if config.block_m == 1 and config.block_n in _MOST_REGISTERS and x.is_cuda:
            options["maxnreg"] = _MOST_REGISTERS[config.block_n]
    if config.block_m == 1 or config.vector:
        pairs = x.view(torch.int32), weight.view(torch.int32)
        arguments: tuple[Any, ...] = (*pairs, bias, y, partials, counters, lora, n, k // 2, steps)
        if not config.vector:
            return Launch(vector_product_kernel, (tiles, config.split_k), arguments, options)
        options["BLOCK_M"] = config.block_m
        arguments = (*pairs, bias, y, partials, counters, m, n, k // 2, x.stride(0) // 2, steps)
        return Launch(vector_rows_kernel, (tiles, config.split_k), arguments, options)
    arguments = (x, weight, bias, y, partials, counters, lora, m, n, k, x.stride(0), steps)
    options |= {"BLOCK_M": config.block_m, "STAGES": config.num_stages}
    return Launch(matrix_product_kernel, (tiles, config.split_k), arguments, options)


def fuses(config: SkinnyConfig, weights: LoraSlots) -> bool:
    """Whether a product that is launched so can add these adapters."""
    if config.vector or not fits(weights, config.block_n):
        return False
    return config.block_m > 1 or config.split_k == 1


def shrinking_programs(config: SkinnyConfig, m: int, weights: LoraSlots) -> Shrinking:
    """The programs of such a product of m rows that multiply with A of their adapters."""
    if config.block_m == 1:
        return Shrinking.of_row(weights, config.num_warps)
    stage = 2 * config.block_k * (config.block_n + config.block_m)
    stages = config.num_stages - (config.block_n < 64)  # as Triton allocates them
    at_once = max(1, _SHARED_BYTES // max(1, stage * stages))
    return Shrinking.of_rows(
        weights,
        m,
        lines=config.block_n,
        block_k=config.block_k,
        splits=config.split_k,
        programs=triton.cdiv(weights.b.shape[1], config.block_n) * config.split_k,
        places=at_once * num_multiprocessors(weights.a.device),
    )


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
    adapters: FusedAdapters | None = None,
) -> Tensor:
    """x @ weight^T + bias with fp32 sums, for a few rows.

    Products of one device must run one after the other, as those of one stream do: those with
    split K share their counters. May be captured in a CUDA graph after one run outside of it.

    Args:
        x: [M, K] bf16 or fp16, rows contiguous, M at most 64, K a multiple of 16.
        weight: [N, K] of the same dtype, contiguous.
        bias: [N] of the same dtype.
        config: How to launch it; by default what `choose` says, which must then not be None.
        adapters: What is added to the rows that have an adapter, before the result is rounded.

    Returns:
        [M, N] in x's dtype.
    """
    assert serves(x, weight, bias), "skinny_gemm cannot serve these tensors"
    (m, k), n = x.shape, weight.shape[0]
    if config is None:
        config = choose(m, n, k) if adapters is None else choose(m, n, k, with_adapters=True)
    assert config is not None, f"no configuration for m={m}, n={n}, k={k}"
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    plan_launch(x, weight, bias, y=y, config=config, adapters=adapters)()
    return y


def skinny_gemm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`skinny_gemm` in plain torch: fp32 products and sums, rounded once at the end."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `skinny_gemm` can compute this product: device, dtypes, strides and sizes."""
    return (
        (x.is_cuda or INTERPRETED)
        and x.ndim == 2
        and 0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] == weight.shape[1]
        and x.dtype in _DTYPES
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.shape[1] % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) % _GROUP == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias on any device: ours where it is faster, the library elsewhere.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [..., N] in x's dtype.
    """
    if serves(x, weight, bias):
        config = choose(x.shape[0], weight.shape[0], x.shape[1])
        if config is not None:
            return skinny_gemm(x, weight, bias, config=config)
    return F.linear(x, weight, bias)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Products of at most `max_m` rows and `min_n` to `max_n` features: the first configuration
    whose block divides K serves."""

    max_m: int
    min_n: int
    max_n: int
    configs: tuple[SkinnyConfig, ...]  # none: the library is faster


_ANY_N = 1 << 31
_VECTOR = (
    SkinnyConfig(1, 8, 1024, num_warps=4),
    SkinnyConfig(1, 8, 512, num_warps=2),
    SkinnyConfig(1, 8, 256, num_warps=1),
)
_VECTOR_NARROW = (SkinnyConfig(1, 4, 1024, num_warps=4), *_VECTOR)
_VECTOR_ROWS = (
    SkinnyConfig(2, 4, 1024, num_warps=4, vector=True),
    SkinnyConfig(2, 4, 512, num_warps=2, vector=True),
    SkinnyConfig(2, 4, 256, num_warps=1, vector=True),
)
_MOST, _HEAD = 8192, 1 << 16
"""Features up to which a layer's product is narrow, and from which it can only be the head."""

# In order; the first row whose limits hold decides. bench/results/small_linear.*.json, and whole
# steps: a product is launched while the kernel before it still runs, and unless one program takes
# more than half of a multiprocessor's shared memory, some get two programs and some none.
_FUSING = (
    _Row(1, 0, 4096, _VECTOR_NARROW),
    _Row(1, 0, _ANY_N, _VECTOR),
    _Row(8, 0, 4096, (SkinnyConfig(8, 32, 256, num_stages=7),)),
    _Row(8, 0, _MOST, (SkinnyConfig(8, 32, 256, num_stages=4),)),
    _Row(8, _HEAD, _ANY_N, (SkinnyConfig(8, 32, 256, num_stages=6),)),
    _Row(16, 0, 4096, (SkinnyConfig(16, 32, 256, num_stages=6),)),
    _Row(16, 0, _MOST, (SkinnyConfig(16, 32, 256, num_stages=4),)),
    _Row(16, _HEAD, _ANY_N, (SkinnyConfig(16, 32, 256, num_stages=6),)),
    _Row(32, 0, 4096, (SkinnyConfig(32, 64, 128, split_k=2, num_stages=5),)),
    _Row(32, _HEAD, _ANY_N, (SkinnyConfig(32, 64, 128, num_stages=4),)),
    _Row(64, _HEAD, _ANY_N, (SkinnyConfig(64, 64, 128, num_stages=4),)),
)
_TABLE = (
    *_FUSING[:2],
    _Row(2, 0, _ANY_N, _VECTOR_ROWS),  # of four rows the arithmetic takes longer than the weights
    *_FUSING[2:],
)

# Where the library is faster, a product with adapters is ours nevertheless: with the library's it
# would take two launches more. The fastest of ours by bench/results/kernels_small_linear.g.json; at
# 32 rows, which it does not have, what lies between its neighbours.
_WITH_ADAPTERS = (
    *_FUSING,
    _Row(16, _MOST, _ANY_N, (SkinnyConfig(16, 64, 128, num_stages=5),)),
    _Row(32, 0, _MOST, (SkinnyConfig(32, 64, 128, split_k=2, num_stages=4),)),
    _Row(32, _MOST, _ANY_N, (SkinnyConfig(32, 64, 128, num_stages=4),)),
    _Row(64, 0, 4096, (SkinnyConfig(64, 64, 128, split_k=2, num_stages=4),)),
    _Row(64, 0, _MOST, (SkinnyConfig(64, 64, 64, split_k=2, num_stages=6),)),
    _Row(64, _MOST, _ANY_N, (SkinnyConfig(64, 128, 64, num_stages=5),)),
)


def choose(m: int, n: int, k: int, *, with_adapters: bool = False) -> SkinnyConfig | None:
    """The measured best launch of an [m, k] x [n, k] product; None where the library is faster, or
    with adapters where there is none of ours."""
    for row in _WITH_ADAPTERS if with_adapters else _TABLE:
        if m <= row.max_m and row.min_n <= n <= row.max_n:
            fitting = (c for c in row.configs if c.fits(m, n, k) and k % c.block_k == 0)
            return next(fitting, None)
    return None
