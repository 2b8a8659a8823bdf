"""Low-rank adapters, one for each row: y[row] += B[slot] @ (scales[slot] * (A[slot] @ x[row])).

Rows of a step name the slot of their adapter, or none. Two kernels, both of which read only the
adapters that rows of the step name (the grouped products of Punica, Chen et al. 2023):

- `lora_shrink_kernel`, u = A x: before the base product, which may start while it runs. Few rows
  would leave most of the device idle, so K is split among programs; each writes its partial sums.
- `lora_expand_kernel`, y += B (scales * u): behind the base product, whose output it adds to. It
  sums the partial sums in the order of the splits, so a result does not depend on timing.

A layer that multiplies with several matrices at once (queries, keys and values) has a part for
each: A of all parts one below the other, and the features of a part take that part's sums alone.

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
    let_next_start,
    num_multiprocessors,
    pdl_options,
    wait_for_inputs,
)

NO_SLOT = -1
"""Slot of a row without an adapter."""

MIN_RANK = 16
"""Least width of a tensor-core operand; smaller ranks are padded with zeros."""
MAX_RANK = 256

_FEW_ROWS = 64
_TILE_OF_FEW, _TILE_OF_MANY = 16, 64  # rows of a tile, in steps of up to `_FEW_ROWS` and of more
_MAX_SPLITS = 16


def padded_rank(rank: int) -> int:
    """The power of two that holds adapters of this rank: what the kernels multiply."""
    assert 0 < rank <= MAX_RANK, rank
    return max(MIN_RANK, triton.next_power_of_2(rank))


@dataclass(frozen=True)
class LoraSlots:
    """The adapters of one layer: one in each slot, zeros in a slot that is free.

    Slots may lie apart: the first stride of the three tensors is any; else they are contiguous.

    Attributes:
        a: [slots, parts * R, K] of the activations' dtype; R is a power of two from `MIN_RANK` to
            `MAX_RANK`.
        b: [slots, N, R] likewise.
        scales: [slots, parts * R] float32.
        bounds: [parts + 1] int32, on the device: where parts of the features begin, and N.
        widest: features of the widest part.
        alignment: what divides all bounds.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    bounds: Tensor
    widest: int
    alignment: int

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
        return self.b.shape[2]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1


@triton.jit
def _rows_and_slots(slot_ptr, m, BLOCK_M: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, tl.load(slot_ptr + rows, mask=rows < m, other=-1)


@triton.jit(do_not_specialize=["m", "share"])
def lora_shrink_kernel(
    u,  # [splits, m, parts, RANK] float32
    x,  # [m, k], rows x_stride apart
    slot_ptr,  # [m] int32
    a,  # [slots, parts, RANK, k], slots a_stride apart
    m,
    k,
    x_stride,
    a_stride,
    num_slots,
    share,  # columns of one split
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows, splits, parts). Sums of rows without an adapter are not written."""
    rows, slots = _rows_and_slots(slot_ptr, m, BLOCK_M)
    split, part = tl.program_id(1), tl.program_id(2)
    start = split * share
    stop = tl.minimum(k, start + share)
    ranks = tl.arange(0, RANK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row_pointers = x + rows.to(tl.int64)[:, None] * x_stride
    out = (split.to(tl.int64) * m + rows)[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
    for slot in tl.range(0, num_slots, num_stages=1):
        mine = slots == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            matrix = a + tl.cast(slot, tl.int64) * a_stride + part * RANK * k
            sums = tl.zeros((BLOCK_M, RANK), tl.float32)
            for offset in tl.range(start, stop, BLOCK_K):
                columns = offset + tl.arange(0, BLOCK_K)
                inside = columns < k
                left = tl.load(
                    row_pointers + columns[None, :], mask=mine[:, None] & inside[None, :], other=0.0
                )
                right = tl.load(
                    matrix + ranks[None, :] * k + columns[:, None], mask=inside[:, None], other=0.0
                )
                if IN_INTERPRETER:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                sums = tl.dot(left, right, sums, input_precision="ieee")
            tl.store(u + out, sums, mask=mine[:, None])


@triton.jit(do_not_specialize=["m", "splits"])
def lora_expand_kernel(
    y,  # [m, n], rows y_stride apart
    u,  # [splits, m, parts, RANK] float32
    slot_ptr,  # [m] int32
    b,  # [slots, n, RANK], slots b_stride apart
    scales,  # [slots, parts, RANK] float32, slots scale_stride apart
    bounds,  # [parts + 1] int32
    m,
    y_stride,
    b_stride,
    scale_stride,
    num_slots,
    splits,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows, tiles of the widest part's features, parts)."""
    rows, slots = _rows_and_slots(slot_ptr, m, BLOCK_M)
    part = tl.program_id(2)
    features = tl.load(bounds + part) + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = features < tl.load(bounds + part + 1)
    ranks = tl.arange(0, RANK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    has_adapter = slots >= 0
    if (tl.max(has_adapter.to(tl.int32), 0) > 0) & (tl.max(inside.to(tl.int32), 0) > 0):
        places = rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
        low = tl.zeros((BLOCK_M, RANK), tl.float32)
        for split in tl.range(0, splits, num_stages=1):
            shares = u + tl.cast(split, tl.int64) * m * (PARTS * RANK)
            low += tl.load(shares + places, mask=has_adapter[:, None], other=0.0)
        scale_of = slots.to(tl.int64)[:, None] * scale_stride + part * RANK + ranks[None, :]
        low *= tl.load(scales + scale_of, mask=has_adapter[:, None], other=0.0)
        low = low.to(b.dtype.element_ty)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for slot in tl.range(0, num_slots, num_stages=1):
            mine = slots == slot
            if tl.max(mine.to(tl.int32), 0) > 0:
                matrix = b + tl.cast(slot, tl.int64) * b_stride
                right = tl.load(
                    matrix + features[None, :] * RANK + ranks[:, None],
                    mask=inside[None, :],
                    other=0.0,
                )
                left = tl.where(mine[:, None], low, 0.0)
                if IN_INTERPRETER:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                sums = tl.dot(left, right, sums, input_precision="ieee")
        pointers = y + rows.to(tl.int64)[:, None] * y_stride + features[None, :]
        mask = has_adapter[:, None] & inside[None, :]
        base = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, (base + sums).to(y.dtype.element_ty), mask=mask)


def _rows_of_tile(m: int) -> int:
    return _TILE_OF_FEW if m <= _FEW_ROWS else _TILE_OF_MANY


def _split_columns(m: int, k: int, block_k: int, weights: LoraSlots) -> int:
    """Columns of x that one program multiplies, a multiple of `block_k`. K is split until there are
    two programs for each multiprocessor, or `_MAX_SPLITS` splits."""
    tiles = triton.cdiv(m, _rows_of_tile(m)) * weights.parts
    wanted = triton.cdiv(2 * num_multiprocessors(weights.a.device), tiles)
    return triton.cdiv(triton.cdiv(k, block_k), min(_MAX_SPLITS, wanted)) * block_k


def lora_shrink(x: Tensor, slots: Tensor, weights: LoraSlots) -> Tensor:
    """The product of each row with A of its adapter.

    Args:
        x: [M, K] of the adapters' dtype, rows contiguous.
        slots: [M] int32, `NO_SLOT` for rows without an adapter.

    Returns:
        [splits, M, parts, R] float32, to be summed over the splits; rows without an adapter hold
        anything.
    """
    (m, k), rank = x.shape, weights.rank
    assert x.stride(1) == 1 and x.dtype == weights.a.dtype and k == weights.a.shape[2]
    assert slots.shape == (m,) and slots.dtype == torch.int32 and slots.is_contiguous()
    assert x.is_cuda or INTERPRETED
    block_k = 128 if rank <= 64 else 64
    share = _split_columns(m, k, block_k, weights) if m > 0 else k
    splits = triton.cdiv(k, share)
    u = torch.empty((splits, m, weights.parts, rank), dtype=torch.float32, device=x.device)
    if m == 0:
        return u
    block_m = _rows_of_tile(m)
    lora_shrink_kernel[(triton.cdiv(m, block_m), splits, weights.parts)](
        *(u, x, slots, weights.a),
        *(m, k, x.stride(0), weights.a.stride(0), len(weights.a), share),
        RANK=rank,
        PARTS=weights.parts,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
        **pdl_options(x.device),
    )
    return u


def lora_expand(y: Tensor, u: Tensor, slots: Tensor, weights: LoraSlots) -> Tensor:
    """Adds B (scales * u) to the rows of `y` that have an adapter; others are not touched.

    Args:
        y: [M, N], rows contiguous; float32, bf16 or fp16.
        u: of `lora_shrink`, for the same rows.
        slots: as of `lora_shrink`.

    Returns:
        `y`.
    """
    m, rank = len(y), weights.rank
    assert y.stride(1) == 1 and y.shape[1] == weights.b.shape[1]
    assert u.shape[1:] == (m, weights.parts, rank) and u.is_contiguous()
    if m == 0:
        return y
    block_m = _rows_of_tile(m)
    block_n = 128 if rank <= 64 else 64
    tiles = triton.cdiv(weights.widest, block_n)
    lora_expand_kernel[(triton.cdiv(m, block_m), tiles, weights.parts)](
        *(y, u, slots, weights.b, weights.scales, weights.bounds),
        *(m, y.stride(0), weights.b.stride(0), weights.scales.stride(0)),
        *(len(weights.b), u.shape[0]),
        RANK=rank,
        PARTS=weights.parts,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        **pdl_options(y.device),
    )
    return y


def lora_reference(y: Tensor, x: Tensor, slots: Tensor, weights: LoraSlots) -> Tensor:
    """`lora_shrink` and `lora_expand` in plain torch, in float32; a new [M, N] tensor of y's
    dtype."""
    out = y.float()
    for row, slot in enumerate(slots.tolist()):
        if slot == NO_SLOT:
            continue
        u = weights.scales[slot] * (weights.a[slot].float() @ x[row].float())
        u = u.view(weights.parts, -1)
        for part, (first, stop) in enumerate(pairwise(weights.bounds.tolist())):
            out[row, first:stop] += weights.b[slot, first:stop].float() @ u[part]
    return out.to(y.dtype)
