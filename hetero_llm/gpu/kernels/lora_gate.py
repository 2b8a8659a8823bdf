"""activation(gate) * up of a product of many rows, with the adapters of that product.

Gate and up are the widest output of a layer. Where `lora_expand` would read and write it once more,
this kernel adds B u to what the activation reads anyway: for rows that have gone through
`lora.lora_shrink`, behind the product without adapters. It rounds where `lora_expand` and
`activation.gated_activation` round one after the other.

Wrapper `lora_gate`, reference `lora_gate_reference`; timed by `bench.kernels.lora`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.activation import KINDS, activate, gated_activation_reference
from hetero_llm.gpu.kernels.launch import IN_INTERPRETER, pdl_options, wait_and_release
from hetero_llm.gpu.kernels.lora import (
    ExpandConfig,
    LoraSlots,
    RowGroups,
    load_low,
    lora_reference,
)

_FEW_ROWS = 64


def choose(m: int, rank: int, dtype: torch.dtype) -> ExpandConfig:
    """The launch for m rows and adapters of a padded rank: `block_n` outputs at a time."""
    if m <= _FEW_ROWS or dtype == torch.float32:
        return ExpandConfig(16, 32 if rank <= 64 else 16)
    return ExpandConfig(64, 64, tiles=4) if rank <= 64 else ExpandConfig(64, 32)


@triton.jit
def _with_adapter(base, low, matrix, features, there, RANK: tl.constexpr):
    """Base values + low times B of the features, rounded; B is zero where it is not there."""
    right = tl.load(matrix + features[None, :] * RANK, mask=there[None, :], other=0.0)
    if IN_INTERPRETER:
        low, right = low.to(tl.float32), right.to(tl.float32)
    sums = tl.dot(low, right, input_precision="ieee")
    return (sums + base.to(tl.float32)).to(base.dtype)


@triton.jit(do_not_specialize=["m", "splits"])
def lora_gate_kernel(
    out,  # [m, inner]
    gate_up,  # [m, 2 * inner], rows stride apart
    u,  # [splits, places, 2 * RANK] float32
    rows_ptr,  # [places] int32, see RowGroups
    adapters,  # [places / BLOCK] int32
    b,  # [slots, 2 * inner, RANK], slots b_stride apart
    m,
    inner,
    stride,
    b_stride,
    splits,
    NAME: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of places)."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * (TILES * BLOCK_N)
    stop = tl.minimum(inner, first + TILES * BLOCK_N)
    places = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_and_release(PDL)
    slot = tl.load(adapters + tl.program_id(1) * BLOCK_M // BLOCK).to(tl.int64) - 1
    if slot >= -1:
        rows = tl.load(rows_ptr + places)
        there = rows < m
        sources = gate_up + rows.to(tl.int64)[:, None] * stride
        targets = out + rows.to(tl.int64)[:, None] * inner
        num_places = tl.num_programs(1).to(tl.int64) * BLOCK_M
        # Without an adapter there are no sums: no split and no B are read.
        adapted = slot >= 0
        splits = tl.where(adapted, splits, 0)
        low_gate = load_low(u, places, num_places, 0, splits, b.dtype.element_ty, RANK, 2, BLOCK_M)
        low_up = load_low(u, places, num_places, 1, splits, b.dtype.element_ty, RANK, 2, BLOCK_M)
        matrix = b + slot * b_stride + tl.arange(0, RANK)[:, None]
        for offset in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
            columns = offset + tl.arange(0, BLOCK_N)
            inside = columns < stop
            mask = there[:, None] & inside[None, :]
            gate = tl.load(sources + columns[None, :], mask=mask, other=0.0)
            up = tl.load(sources + (inner + columns)[None, :], mask=mask, other=0.0)
            known = inside & adapted
            gate = _with_adapter(gate, low_gate, matrix, columns, known, RANK)
            up = _with_adapter(up, low_up, matrix, inner + columns, known, RANK)
            active = activate(gate.to(tl.float32), NAME).to(DTYPE)
            product = active.to(tl.float32) * up.to(tl.float32)
            tl.store(targets + columns[None, :], product.to(DTYPE), mask=mask)


def lora_gate(
    gate_up: Tensor,
    u: Tensor,
    groups: RowGroups,
    weights: LoraSlots,
    *,
    name: str,
    config: ExpandConfig | None = None,
) -> Tensor:
    """`activation.gated_activation` of `lora.lora_expand(gate_up, u, groups, weights)`, which is
    not written.

    Args:
        gate_up: [M, 2 * inner], gate first; float32, bf16 or fp16; rows may be strided.
        u: of `lora.lora_shrink`, for the same rows.
        groups: as of `lora.lora_shrink`.
        weights: of the product, with two parts of one size.
        name: of `activation.KINDS`.
        config: How to launch it; by default what `choose` says.

    Returns:
        [M, inner], contiguous.
    """
    m, inner = len(gate_up), gate_up.shape[1] // 2
    config = config or choose(m, weights.rank, weights.b.dtype)
    assert weights.parts == 2 and weights.widest == inner and weights.b.shape[1] == 2 * inner
    assert name in KINDS and gate_up.stride(1) == 1
    assert u.shape[1:] == (len(groups.rows), 2 * weights.rank) and u.is_contiguous()
    assert groups.num_rows == m and groups.block % config.block_m == 0
    out = gate_up.new_empty(m, inner)
    if m == 0:
        return out
    tiles = triton.cdiv(inner, config.tiles * config.block_n)
    lora_gate_kernel[(tiles, len(groups.rows) // config.block_m)](
        *(out, gate_up, u, groups.rows, groups.adapters, weights.b, m, inner),
        *(gate_up.stride(0), weights.b.stride(0), u.shape[0]),
        NAME=KINDS[name],
        RANK=weights.rank,
        BLOCK=groups.block,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        STAGES=config.num_stages if config.tiles > 1 else 1,
        num_warps=config.num_warps,
        **pdl_options(out.device),
    )
    return out


def lora_gate_reference(
    gate_up: Tensor, x: Tensor, slots: Tensor, weights: LoraSlots, *, name: str
) -> Tensor:
    """`lora_shrink` of x and `lora_gate` in plain torch."""
    return gated_activation_reference(lora_reference(gate_up, x, slots, weights), name)
