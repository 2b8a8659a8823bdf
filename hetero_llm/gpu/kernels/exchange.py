"""The first and the last kernels of a step: inputs in, results out.

Host memory that these kernels read and write is page-locked, so a captured step brings its own
transfers: launching it is all that the host does. The host fills the places of a ring in turn,
while earlier steps still run, and a counter on the device names the place whose turn it is: one
step input buffer, and one result, for each step.

- `fetch_pinned` copies the step input buffer to the device.
- `apply_step_inputs` writes the block tables, completes the input tokens and counts the turn on.
- `send_results` writes the results to the host.

Timed by `bench.kernels.step_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FETCH_LANES = 512
_FETCH_WARPS = 4
_APPLY_LANES = 256
_SEND_LANES = 512


@triton.jit(
    do_not_specialize=["quads", "stride_quads"],
    do_not_specialize_on_alignment=["turn_ptr"],  # an element of a tensor
)
def _fetch(out_ptr, ring_ptr, turn_ptr, quads, stride_quads, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < quads * 4  # so written that four words go by one instruction
    place = tl.load(turn_ptr).to(tl.int64) * stride_quads * 4
    # What the host wrote before it launched the step is visible: no cache holds older words.
    words = tl.load(ring_ptr + place + lane, mask=inside)
    tl.store(out_ptr + lane, words, mask=inside)


# Sizes and places in the step input buffer change from step to step: one kernel serves them all.
@triton.jit(
    do_not_specialize=["num_tokens", "write_stride", "table_stride"],
    do_not_specialize_on_alignment=[
        "input_ptr",
        "token_ptr",
        "token_slot_ptr",
        "write_ptr",
        "write_count_ptr",
        "turn_ptr",
    ],
)
def _apply(
    input_ptr, token_ptr, token_slot_ptr, last_ptr, table_ptr, write_ptr, write_count_ptr, turn_ptr,
    num_tokens, write_stride, table_stride, RING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % RING)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    in_tokens = lane < num_tokens
    token = tl.load(token_ptr + lane, mask=in_tokens, other=0)
    slot = tl.load(token_slot_ptr + lane, mask=in_tokens, other=0)
    unknown = in_tokens & (token < 0)
    last = tl.load(last_ptr + slot, mask=unknown, other=0)
    tl.store(input_ptr + lane, tl.where(unknown, last.to(tl.int32), token), mask=in_tokens)

    in_writes = lane < tl.load(write_count_ptr)
    slot = tl.load(write_ptr + lane, mask=in_writes, other=0)
    column = tl.load(write_ptr + write_stride + lane, mask=in_writes, other=0)
    block = tl.load(write_ptr + 2 * write_stride + lane, mask=in_writes, other=0)
    tl.store(table_ptr + slot.to(tl.int64) * table_stride + column, block, mask=in_writes)


@triton.jit(do_not_specialize=["count", "stride"])
def _send(ring_ptr, result_ptr, turn_ptr, count, stride, RING: tl.constexpr, LANES: tl.constexpr):
    turn = tl.load(turn_ptr)
    place = turn.to(tl.int64) * stride
    for first in range(0, count, LANES):
        lane = first + tl.arange(0, LANES)
        results = tl.load(result_ptr + lane, mask=lane < count)
        tl.store(ring_ptr + place + lane, results, mask=lane < count)
    tl.debug_barrier()  # every lane has read the turn
    tl.store(turn_ptr, (turn + 1) % RING)


def fetch_pinned(ring: torch.Tensor, turn: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copies the first words of the place whose turn it is to the device.

    Args:
        ring: [places, >= W] int32 in page-locked host memory, rows of a multiple of 4 words.
        turn: [1] int32 on the device, the place.
        out: [W] int32 on the device, W a multiple of 4.
    """
    (num_words,) = out.shape
    assert ring.dtype == turn.dtype == out.dtype == torch.int32
    assert ring.shape[1] >= num_words and ring.is_contiguous() and out.is_contiguous()
    assert num_words % 4 == ring.shape[1] % 4 == 0, (num_words, ring.shape)
    quads, stride_quads = num_words // 4, ring.shape[1] // 4
    grid = (triton.cdiv(num_words, _FETCH_LANES),)
    _fetch[grid](out, ring, turn, quads, stride_quads, LANES=_FETCH_LANES, num_warps=_FETCH_WARPS)


def apply_step_inputs(
    token_ids: torch.Tensor,
    token_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    writes: torch.Tensor,
    write_count: torch.Tensor,
    *,
    turn: torch.Tensor,
    ring_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes block tables, completes the input tokens, and counts the turn of the input ring on.

    Args:
        token_ids: [T] int32; negative: the token last sampled for the request slot.
        token_slots: [T] int32 request slots.
        last_tokens: [slots] int64.
        block_tables: [slots, columns] int32, written.
        writes: [3, K] int32 request slot, column, block; several writes to one entry must carry the
            same block.
        write_count: [1] int32, number of writes in use.
        turn: [1] int32, counted up modulo `ring_size`; `fetch_pinned` reads it.
        out: [T] int32, the input tokens.

    Returns:
        `out`.
    """
    (num_tokens,) = token_ids.shape
    assert token_ids.dtype == token_slots.dtype == block_tables.dtype == writes.dtype == torch.int32
    assert out.dtype == turn.dtype == torch.int32 and last_tokens.dtype == torch.int64
    assert writes.shape[0] == 3 and writes.stride(1) == 1 and block_tables.stride(1) == 1
    grid = (triton.cdiv(max(num_tokens, writes.shape[1]), _APPLY_LANES),)
    _apply[grid](
        out,
        token_ids,
        token_slots,
        last_tokens,
        block_tables,
        writes,
        write_count,
        turn,
        num_tokens,
        writes.stride(0),
        block_tables.stride(0),
        RING=ring_size,
        LANES=_APPLY_LANES,
        num_warps=4,
    )
    return out


def send_results(results: torch.Tensor, turn: torch.Tensor, *, ring: torch.Tensor) -> None:
    """Writes results to the place whose turn it is, and counts the turn on.

    The host may read them once an event recorded behind this kernel has happened.

    Args:
        results: [N] int64 on the device.
        turn: [1] int32 on the device, counted up modulo the number of places.
        ring: [places, >= N] int64 in page-locked host memory.
    """
    (count,) = results.shape
    assert results.dtype == ring.dtype == torch.int64 and turn.dtype == torch.int32
    assert ring.shape[1] >= count and ring.is_contiguous() and results.is_contiguous()
    _send[(1,)](
        ring, results, turn, count, ring.stride(0), RING=len(ring), LANES=_SEND_LANES, num_warps=4
    )


def fetch_pinned_reference(ring: torch.Tensor, turn: torch.Tensor, *, out: torch.Tensor) -> None:
    """`fetch_pinned` in plain torch."""
    out.copy_(ring[int(turn), : len(out)])


def apply_step_inputs_reference(
    token_ids: torch.Tensor,
    token_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    writes: torch.Tensor,
    write_count: torch.Tensor,
    turn: torch.Tensor,
    ring_size: int,
) -> torch.Tensor:
    """`apply_step_inputs` in plain torch; returns the input tokens."""
    turn.copy_((turn + 1) % ring_size)
    slots, columns, blocks = writes[:, : int(write_count)].long()
    block_tables[slots, columns] = blocks.to(torch.int32)
    sampled = last_tokens[token_slots.long()].to(torch.int32)
    return torch.where(token_ids < 0, sampled, token_ids)


def send_results_reference(
    results: torch.Tensor, turn: torch.Tensor, *, ring: torch.Tensor
) -> None:
    """`send_results` in plain torch."""
    ring[int(turn), : len(results)] = results.to(ring.device)
    turn.copy_((turn + 1) % len(ring))
