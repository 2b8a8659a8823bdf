"""Step packets in, results out, through page-locked host memory that kernels read and write.

A captured step thus brings its own transfers: launching it is all the host does. The host goes
round a ring of places, so that it can fill the next packet while steps are under way, and a counter
on the device goes round with it: one packet, and one result, for each step in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FETCH_LANES = 512
_FETCH_WARPS = 4
_SEND_LANES = 512


@triton.jit(do_not_specialize=["quads", "stride_quads"])
def _fetch(packet_ptr, ring_ptr, turn_ptr, quads, stride_quads, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < quads * 4  # so written that four words go by one instruction
    place = tl.load(turn_ptr).to(tl.int64) * stride_quads * 4
    # What the host wrote before it launched the step is visible: no cache holds older words.
    words = tl.load(ring_ptr + place + lane, mask=inside)
    tl.store(packet_ptr + lane, words, mask=inside)


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


def fetch_packet(ring: torch.Tensor, turn: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copies the packet whose turn it is. `step_inputs.apply_step_inputs` passes the turn on.

    Args:
        ring: [places, >= W] int32 in page-locked host memory, rows of a multiple of 4 words.
        turn: [1] int32 on the device.
        out: [W] int32 on the device, W a multiple of 4.
    """
    (num_words,) = out.shape
    assert ring.dtype == turn.dtype == out.dtype == torch.int32
    assert ring.shape[1] >= num_words and ring.is_contiguous() and out.is_contiguous()
    assert num_words % 4 == ring.shape[1] % 4 == 0, (num_words, ring.shape)
    quads, stride_quads = num_words // 4, ring.shape[1] // 4
    grid = (triton.cdiv(num_words, _FETCH_LANES),)
    _fetch[grid](out, ring, turn, quads, stride_quads, LANES=_FETCH_LANES, num_warps=_FETCH_WARPS)


def send_results(results: torch.Tensor, turn: torch.Tensor, *, ring: torch.Tensor) -> None:
    """Writes results to the place whose turn it is, and passes the turn on.

    The host may read them once an event behind this kernel has happened.

    Args:
        results: [N] int64 on the device.
        turn: [1] int32 on the device, counted up.
        ring: [places, >= N] int64 in page-locked host memory.
    """
    (count,) = results.shape
    assert results.dtype == ring.dtype == torch.int64 and turn.dtype == torch.int32
    assert ring.shape[1] >= count and ring.is_contiguous() and results.is_contiguous()
    _send[(1,)](
        ring, results, turn, count, ring.stride(0), RING=len(ring), LANES=_SEND_LANES, num_warps=4
    )


def fetch_packet_reference(ring: torch.Tensor, turn: torch.Tensor, *, out: torch.Tensor) -> None:
    """The same in plain torch: see `fetch_packet`."""
    out.copy_(ring[int(turn), : len(out)])


def send_results_reference(
    results: torch.Tensor, turn: torch.Tensor, *, ring: torch.Tensor
) -> None:
    """The same in plain torch: see `send_results`."""
    ring[int(turn), : len(results)] = results.to(ring.device)
    turn.copy_((turn + 1) % len(ring))
