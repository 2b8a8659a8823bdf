"""Low-rank adapters, one for each row: y[row] += B[slot] @ (scales[slot] * (A[slot] @ x[row])).

Rows of a step name the slot of their adapter, or none. They are grouped by adapter once a step
(`RowGroups`), so each program of the two kernels works for one adapter, and only adapters that rows
name are read (the grouped products of Punica, Chen et al. 2023):

- `lora_shrink_kernel`, u = scales * (A x), for all parts of a layer with one read of x. K is split
  among programs until the device is full; each writes its partial sums.
- `lora_expand_kernel`, B u: it adds up the partial sums in the order of the splits, so a result
  does not depend on timing. Behind the base product it adds to the output in place; before it, it
  writes the output that the base product adds to, which reads no output of its own.

A layer that multiplies with several matrices at once (queries, keys and values) has a part for
each: A of all parts one below the other, and the features of a part take that part's sums alone.

Experts of a mixture have an adapter each: then a row is a pair of a token and one of its experts,
and pairs are grouped by adapter and expert (`expert_adapters`).

Wrappers `lora_shrink` and `lora_expand`, reference `lora_reference`; timed by `bench.kernels.lora`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    INTERPRETED,
    num_multiprocessors,
    pdl_options,
    wait_and_release,
)

NO_SLOT = -1
"""Slot of a row without an adapter."""

MIN_RANK = 16
"""Least width of a tensor-core operand; smaller ranks are padded with zeros."""
MAX_RANK = 256

MOST_TILES = 65535
"""Of places in a launch: the longest of the other two axes of a grid."""
_MAX_SPLITS = 16
_MOST_LINES = 128  # of A in one program


@dataclass(frozen=True)
class ShrinkConfig:
    """How `lora_shrink` is launched.

    Attributes:
        block_m: Rows of a program.
        block_k: Columns read at a time.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline through shared memory.
        per_sm: Programs of a multiprocessor until which K is split.
        descending: The last rows come first: what the kernel before wrote last is still in L2.
    """

    block_m: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    per_sm: int = 2
    descending: bool = False


@dataclass(frozen=True)
class ExpandConfig:
    """How `lora_expand` is launched.

    Attributes:
        block_m: Rows of a program.
        block_n: Features written at a time.
        tiles: Times `block_n`: features of a program, which reads its rows' sums once for all.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline through shared memory, where there are several tiles.
    """

    block_m: int
    block_n: int
    tiles: int = 1
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class LoraLaunches:
    """Launches of a step's kernels.

    Attributes:
        shrink: of `lora_shrink`.
        add: of `lora_expand` behind the product.
        write: of `lora_expand` before it.
    """

    shrink: ShrinkConfig
    add: ExpandConfig
    write: ExpandConfig


_FEW_ROWS = 64
_EXACT = LoraLaunches(
    ShrinkConfig(16, 32), ExpandConfig(16, 64), ExpandConfig(16, 64)
)  # in float32
_FEW = LoraLaunches(ShrinkConfig(16, 128), ExpandConfig(16, 128), ExpandConfig(16, 128))
_FEW_WIDE = LoraLaunches(ShrinkConfig(16, 64), ExpandConfig(16, 64), ExpandConfig(16, 64))
_MANY = LoraLaunches(
    ShrinkConfig(64, 128, descending=True),
    ExpandConfig(64, 128, tiles=4),
    ExpandConfig(64, 128, tiles=1),
)
_MANY_WIDE = LoraLaunches(ShrinkConfig(64, 64), ExpandConfig(64, 64), ExpandConfig(64, 64))
_WIDE = 64  # ranks above it


def choose(m: int, rank: int, dtype: torch.dtype) -> LoraLaunches:
    """The launches for m rows and adapters of a padded rank."""
    if dtype == torch.float32:
        return _EXACT
    if m <= _FEW_ROWS:
        return _FEW if rank <= _WIDE else _FEW_WIDE
    return _MANY if rank <= _WIDE else _MANY_WIDE


def block_of(config: LoraLaunches) -> int:
    """Rows of a block of `RowGroups` for these launches."""
    return max(config.shrink.block_m, config.add.block_m, config.write.block_m)


def padded_rank(rank: int) -> int:
    """The power of two that holds adapters of this rank: what the kernels multiply."""
    assert 0 < rank <= MAX_RANK, rank
    return max(MIN_RANK, triton.next_power_of_2(rank))


@dataclass(frozen=True)
class RowGroups:
    """Rows of a step by their adapter, in blocks; made by `lora_product.group_rows`.

    Attributes:
        rows: [blocks * block] int32: rows of one adapter in each block, ascending; `num_rows` where
            a block has no row.
        adapters: [blocks] int32: 1 + the adapter's slot; 0: rows without an adapter; -1: no rows.
            With experts 1 + the slot * experts + the expert.
        num_rows: M.
        block: rows of a block, a power of two.
    """

    rows: Tensor
    adapters: Tensor
    num_rows: int
    block: int


@dataclass(frozen=True)
class LoraSlots:
    """The adapters of one layer: one in each slot, zeros in a slot that is free.

    Slots may lie apart: the first stride of the three tensors is any; else they are contiguous.
    With `experts`, slots have a matrix for each: a is [slots, experts, parts * R, K] and so on.

    Attributes:
        a: [slots, parts * R, K] of the activations' dtype; R is a power of two from `MIN_RANK` to
            `MAX_RANK`.
        b: [slots, N, R] likewise.
        scales: [slots, parts * R] float32.
        bounds: [parts + 1] int32, on the device: where parts of the features begin, and N.
        widest: features of the widest part.
        alignment: what divides all bounds.
        experts: matrices of each slot; 1: a layer without experts.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    bounds: Tensor
    widest: int
    alignment: int
    experts: int = 1

    @staticmethod
    def empty(
        slots: int, rank: int, columns: int, features: Sequence[int], like: Tensor
    ) -> LoraSlots:
        """Free slots.

        Args:
            rank: of the largest adapter, see `padded_rank`.
            columns: K.
            features: of each part.
            like: says device and dtype.
        """
        width = padded_rank(rank)
        assert all(count > 0 for count in features), features
        return LoraSlots(
            a=like.new_zeros(slots, len(features) * width, columns),
            b=like.new_zeros(slots, sum(features), width),
            scales=like.new_zeros(slots, len(features) * width, dtype=torch.float32),
            bounds=torch.tensor([0, *accumulate(features)], dtype=torch.int32, device=like.device),
            widest=max(features),
            alignment=math.gcd(*features),
        )

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[-1]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1


@triton.jit(do_not_specialize=["m", "steps"])
def lora_shrink_kernel(
    u,  # [splits, places, PARTS * RANK] float32
    x,  # [m / PER_ROW, k], rows x_stride apart
    rows_ptr,  # [places] int32, see RowGroups
    adapters,  # [places / BLOCK] int32
    a,  # [slots, PARTS * RANK, k], slots a_stride apart
    scales,  # [slots, PARTS * RANK] float32, slots scale_stride apart
    m,
    k,
    x_stride,
    a_stride,
    scale_stride,
    steps,  # blocks of columns of one split
    EXPERTS: tl.constexpr,  # matrices of a slot, one behind the other
    PER_ROW: tl.constexpr,  # places that share a row of x
    WIDTH: tl.constexpr,  # PARTS * RANK
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of lines, splits, tiles of places). Sums of places without an adapter are not
    written."""
    tile = tl.program_id(2)
    if DESCENDING:
        tile = tl.num_programs(2) - 1 - tile
    split = tl.program_id(1)
    start = split * steps * BLOCK_K
    stop = tl.minimum(k, start + steps * BLOCK_K)
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    exists = lines < WIDTH
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_and_release(PDL)
    found = tl.load(adapters + tile * BLOCK_M // BLOCK).to(tl.int64) - 1
    if found >= 0:
        slot, expert = found // EXPERTS, found % EXPERTS
        rows = tl.load(rows_ptr + places)
        there = rows < m
        row_pointers = x + (rows // PER_ROW).to(tl.int64)[:, None] * x_stride
        line_pointers = a + slot * a_stride + expert * (WIDTH * k) + lines[None, :] * k
        sums = tl.zeros((BLOCK_M, LINES), tl.float32)
        for offset in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
            columns = offset + tl.arange(0, BLOCK_K)
            inside = columns < k
            left = tl.load(
                row_pointers + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            right = tl.load(
                line_pointers + columns[:, None], mask=exists[None, :] & inside[:, None], other=0.0
            )
            if IN_INTERPRETER:
                left, right = left.to(tl.float32), right.to(tl.float32)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        own_scales = scales + slot * scale_stride + expert * WIDTH
        sums *= tl.load(own_scales + lines, mask=exists, other=0.0)[None, :]
        num_places = tl.num_programs(2).to(tl.int64) * BLOCK_M
        out = (split * num_places + places)[:, None] * WIDTH + lines[None, :]
        tl.store(u + out, sums, mask=exists[None, :])


@triton.jit
def load_low(
    u, places, num_places, part, splits, DTYPE: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, RANK] of `lora_shrink`, added up over the splits."""
    ranks = part * RANK + tl.arange(0, RANK)
    inner = places.to(tl.int64)[:, None] * (PARTS * RANK) + ranks[None, :]
    low = tl.zeros((BLOCK_M, RANK), tl.float32)
    for split in tl.range(0, splits, num_stages=1):
        low += tl.load(u + tl.cast(split, tl.int64) * num_places * (PARTS * RANK) + inner)
    return low.to(DTYPE)


@triton.jit(do_not_specialize=["m", "splits"])
def lora_expand_kernel(
    y,  # [m, n], rows y_stride apart
    u,  # [splits, places, PARTS * RANK] float32
    bias,  # [n]
    rows_ptr,  # [places] int32, see RowGroups
    adapters,  # [places / BLOCK] int32
    b,  # [slots, n, RANK], slots b_stride apart
    bounds,  # [parts + 1] int32
    m,
    y_stride,
    b_stride,
    expert_stride,
    splits,
    EXPERTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,  # divides all bounds: loads are as wide as that allows
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of the widest part's features, tiles of places, parts)."""
    part = tl.program_id(2)
    first = tl.multiple_of(tl.load(bounds + part), ALIGNED) + tl.program_id(0) * (TILES * BLOCK_N)
    stop = tl.multiple_of(tl.load(bounds + part + 1), ALIGNED)
    stop = tl.minimum(stop, first + TILES * BLOCK_N)
    places = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_and_release(PDL)
    slot = tl.load(adapters + tl.program_id(1) * BLOCK_M // BLOCK).to(tl.int64) - 1
    if (first < stop) & (slot >= (0 if ADD else -1)):
        rows = tl.load(rows_ptr + places)
        there = rows < m
        row_pointers = y + rows.to(tl.int64)[:, None] * y_stride
        num_places = tl.num_programs(1).to(tl.int64) * BLOCK_M
        # Without an adapter there are no sums: no split and no B are read.
        adapted = slot >= 0
        splits = tl.where(adapted, splits, 0)
        own_b = b + (slot // EXPERTS) * b_stride + (slot % EXPERTS) * expert_stride
        low = load_low(
            u, places, num_places, part, splits, b.dtype.element_ty, RANK, PARTS, BLOCK_M
        )
        matrix = own_b + tl.arange(0, RANK)[:, None]
        for offset in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
            features = offset + tl.arange(0, BLOCK_N)
            inside = features < stop
            mask = there[:, None] & inside[None, :]
            pointers = row_pointers + features[None, :]
            if ADD:
                base = tl.load(pointers, mask=mask, other=0.0)
            right = tl.load(
                matrix + features[None, :] * RANK, mask=(inside & adapted)[None, :], other=0.0
            )
            left = low
            if IN_INTERPRETER:
                left, right = left.to(tl.float32), right.to(tl.float32)
            sums = tl.dot(left, right, input_precision="ieee")
            if ADD:
                sums += base.to(tl.float32)
            if HAS_BIAS:
                sums += tl.load(bias + features, mask=inside, other=0.0).to(tl.float32)[None, :]
            tl.store(pointers, sums.to(y.dtype.element_ty), mask=mask)


def _steps_of_split(tiles: int, k: int, config: ShrinkConfig, device: torch.device) -> int:
    """Blocks of columns that one program multiplies: K is split while all programs still run at
    once."""
    wanted = max(1, config.per_sm * num_multiprocessors(device) // tiles)
    return triton.cdiv(triton.cdiv(k, config.block_k), min(_MAX_SPLITS, wanted))


def lora_shrink(
    x: Tensor, groups: RowGroups, weights: LoraSlots, *, config: ShrinkConfig | None = None
) -> Tensor:
    """The product of each row with A of its adapter, times the adapter's scales.

    Args:
        x: [M, K] of the adapters' dtype, rows contiguous; fewer rows where as many of the groups'
            rows share each, one behind the other, as experts do.
        groups: of the M rows.
        config: How to launch it; by default what `choose` says.

    Returns:
        [splits, places, parts * R] float32, to be summed over the splits, for each place of
        `groups.rows`; places without a row and rows without an adapter hold anything.
    """
    k, width, m = x.shape[1], weights.a.shape[-2], groups.num_rows
    config = config or choose(m, weights.rank, x.dtype).shrink
    assert x.stride(1) == 1 and x.dtype == weights.a.dtype and k == weights.a.shape[-1]
    per_row = m // len(x) if m else 1
    assert per_row * len(x) == m and groups.block % config.block_m == 0
    assert x.is_cuda or INTERPRETED
    assert len(groups.rows) // config.block_m <= MOST_TILES, (len(groups.rows), config)
    lines = min(_MOST_LINES, triton.next_power_of_2(width))
    line_tiles, places = triton.cdiv(width, lines), len(groups.rows)
    tiles = triton.cdiv(m, config.block_m) * line_tiles
    steps = _steps_of_split(tiles, k, config, x.device) if m > 0 else k
    splits = triton.cdiv(k, steps * config.block_k)
    u = torch.empty((splits, places, width), dtype=torch.float32, device=x.device)
    if m == 0:
        return u
    lora_shrink_kernel[(line_tiles, splits, places // config.block_m)](
        *(u, x, groups.rows, groups.adapters, weights.a, weights.scales, m, k),
        *(x.stride(0), weights.a.stride(0), weights.scales.stride(0), steps),
        EXPERTS=weights.experts,
        PER_ROW=per_row,
        WIDTH=width,
        LINES=lines,
        BLOCK=groups.block,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        DESCENDING=config.descending,
        num_warps=config.num_warps,
        **pdl_options(x.device),
    )
    return u


def lora_expand(
    y: Tensor,
    u: Tensor,
    groups: RowGroups,
    weights: LoraSlots,
    *,
    add: bool = True,
    bias: Tensor | None = None,
    config: ExpandConfig | None = None,
) -> Tensor:
    """Adds B u and the bias to rows of `y`, or writes them.

    Args:
        y: [M, N], rows contiguous; float32, bf16 or fp16.
        u: of `lora_shrink`, for the same rows.
        groups: as of `lora_shrink`.
        add: False: the rows are written, with nothing but the bias in those without an adapter.
            True: those without an adapter are not touched.
        bias: [N] of y's dtype; only where `add` is False.
        config: How to launch it; by default what `choose` says.

    Returns:
        `y`.
    """
    m, rank = len(y), weights.rank
    if config is None:
        launches = choose(m, rank, weights.b.dtype)
        config = launches.add if add else launches.write
    assert y.stride(1) == 1 and y.shape[1] == weights.b.shape[-2]
    assert bias is None or (not add and bias.dtype == y.dtype and bias.is_contiguous())
    assert u.shape[1:] == (len(groups.rows), weights.parts * rank) and u.is_contiguous()
    assert groups.num_rows == m and groups.block % config.block_m == 0
    assert len(groups.rows) // config.block_m <= MOST_TILES, (len(groups.rows), config)
    if m == 0:
        return y
    tiles = triton.cdiv(weights.widest, config.tiles * config.block_n)
    lora_expand_kernel[(tiles, len(groups.rows) // config.block_m, weights.parts)](
        *(y, u, bias, groups.rows, groups.adapters, weights.b, weights.bounds),
        *(m, y.stride(0), weights.b.stride(0), y.shape[1] * rank, u.shape[0]),
        EXPERTS=weights.experts,
        RANK=rank,
        PARTS=weights.parts,
        BLOCK=groups.block,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        STAGES=config.num_stages if config.tiles > 1 else 1,
        ALIGNED=math.gcd(weights.alignment, 16),
        ADD=add,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
        **pdl_options(y.device),
    )
    return y


def lora_reference(y: Tensor, x: Tensor, slots: Tensor, weights: LoraSlots) -> Tensor:
    """`lora_shrink` and `lora_expand` in plain torch, in float32; a new [M, N] tensor of y's
    dtype."""
    out = y.to(torch.float32, copy=True)
    for row, slot in enumerate(slots.tolist()):
        if slot == NO_SLOT:
            continue
        u = weights.scales[slot] * (weights.a[slot].float() @ x[row].float())
        u = u.view(weights.parts, -1)
        for part, (first, stop) in enumerate(pairwise(weights.bounds.tolist())):
            out[row, first:stop] += weights.b[slot, first:stop].float() @ u[part]
    return out.to(y.dtype)
