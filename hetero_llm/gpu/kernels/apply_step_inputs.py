"""The first kernel of a step: block-table writes, and input tokens that only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LANES = 256


@triton.jit
def _apply(
    input_ptr, token_ptr, row_slot_ptr, last_ptr, table_ptr, write_ptr, num_writes_ptr, turn_ptr,
    num_rows, write_stride, table_stride, RING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % RING)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    in_rows = lane < num_rows
    token = tl.load(token_ptr + lane, mask=in_rows, other=0)
    slot = tl.load(row_slot_ptr + lane, mask=in_rows, other=0)
    unknown = in_rows & (token < 0)
    last = tl.load(last_ptr + slot, mask=unknown, other=0)
    tl.store(input_ptr + lane, tl.where(unknown, last.to(tl.int32), token), mask=in_rows)

    in_writes = lane < tl.load(num_writes_ptr)
    slot = tl.load(write_ptr + lane, mask=in_writes, other=0)
    column = tl.load(write_ptr + write_stride + lane, mask=in_writes, other=0)
    block = tl.load(write_ptr + 2 * write_stride + lane, mask=in_writes, other=0)
    tl.store(table_ptr + slot.to(tl.int64) * table_stride + column, block, mask=in_writes)


def apply_step_inputs(
    token_ids: torch.Tensor,
    row_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    tables: torch.Tensor,
    writes: torch.Tensor,
    num_writes: torch.Tensor,
    *,
    turn: torch.Tensor,
    ring_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes block tables, completes the input tokens, and passes on the packets' turn.

    Args:
        token_ids: [T] int32; negative: the token last drawn for the row's slot.
        row_slots: [T] int32.
        last_tokens: [slots] int64.
        tables: [slots, columns] int32, written.
        writes: [3, K] int32 slot, column, block; the same place twice with the same block only.
        num_writes: [1] int32, how many of the K count.
        turn: [1] int32, counted up modulo `ring_size`: see `exchange.fetch_packet`.
        out: [T] int32, the input tokens.

    Returns:
        `out`.
    """
    (num_rows,) = token_ids.shape
    assert token_ids.dtype == row_slots.dtype == tables.dtype == writes.dtype == torch.int32
    assert out.dtype == turn.dtype == torch.int32 and last_tokens.dtype == torch.int64
    assert writes.shape[0] == 3 and writes.stride(1) == 1 and tables.stride(1) == 1
    grid = (triton.cdiv(max(num_rows, writes.shape[1]), _LANES),)
    _apply[grid](
        out,
        token_ids,
        row_slots,
        last_tokens,
        tables,
        writes,
        num_writes,
        turn,
        num_rows,
        writes.stride(0),
        tables.stride(0),
        RING=ring_size,
        LANES=_LANES,
        num_warps=4,
    )
    return out


def apply_step_inputs_reference(
    token_ids: torch.Tensor,
    row_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    tables: torch.Tensor,
    writes: torch.Tensor,
    num_writes: torch.Tensor,
    turn: torch.Tensor,
    ring_size: int,
) -> torch.Tensor:
    """The same in plain torch: see `apply_step_inputs`."""
    turn.copy_((turn + 1) % ring_size)
    slots, columns, blocks = writes[:, : int(num_writes)].long()
    tables[slots, columns] = blocks.to(torch.int32)
    drawn = last_tokens[row_slots.long()].to(torch.int32)
    return torch.where(token_ids < 0, drawn, token_ids)
