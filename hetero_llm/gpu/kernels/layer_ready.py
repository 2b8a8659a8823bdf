"""A step waits on the device for KV that is still on its way from host memory.

Behind the copies of each layer, the copier writes to `flags[place]` how many layers have landed.
One warp reads all places until those that the step is armed for have counted far enough.

Order of memory: the copies, then the write of the flag behind them in their stream
(cuStreamWriteValue32 fences the system), then the read and the fence here, then attention.
Attention is a later launch of this stream and reads nothing that loads bring before this kernel has
ended (the rules of `launch`), so no first-level cache holds an older line; the copy engine writes
through the second level.

Wrapper `wait_for_loads`, reference `wait_for_loads_reference`; timed by `bench.kernels.step_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import INTERPRETED, let_next_start, pdl_options, wait_for_inputs

PLACES = 64
"""Loads that may run at once."""

ARMED_WORDS = 2 * PLACES + 4
"""int32 words that say what a step waits for: the base of each place, 1 for each place that it
waits for, the step's turn, 1 once it has given up, two unused."""

TURN, GAVE_UP = 2 * PLACES, 2 * PLACES + 1

MOST_LOOKS = 3 << 20
"""About two seconds, if reading the flags takes 0.6 us (a guess; bench.kernels.step_parts)."""


@triton.jit
def _count_missing(pointers, wanted, armed):
    """Number of armed places below `wanted`; counters wrap, so the difference decides."""
    flags = tl.load(pointers, volatile=True)
    return tl.sum(tl.where((armed != 0) & (flags - wanted < 0), 1, 0), 0)


@triton.jit
def see_what_came_before(FENCE: tl.constexpr):
    """Makes the reads before it an acquire: writes ahead of the flags are visible from here on."""
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["layer", "most_looks"])
def _wait(
    flag_ptr, armed_ptr, error_ptr, layer, most_looks,
    PLACES: tl.constexpr, FENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    place = tl.arange(0, PLACES)
    wanted = tl.load(armed_ptr + place) + layer + 1
    armed = tl.load(armed_ptr + PLACES + place)
    turn = tl.load(armed_ptr + 2 * PLACES)
    gave_up = tl.load(armed_ptr + 2 * PLACES + 1)
    missing = _count_missing(flag_ptr + place, wanted, armed)
    looks = gave_up * most_looks  # the step has failed: its other layers do not wait
    while (missing > 0) & (looks < most_looks):
        missing = _count_missing(flag_ptr + place, wanted, armed)
        looks += 1
    see_what_came_before(FENCE)
    let_next_start(PDL)  # not earlier: the next kernel may ask for keys before it waits
    if missing > 0:
        tl.store(armed_ptr + 2 * PLACES + 1, 1)
        tl.store(error_ptr + turn, 1)


def wait_for_loads(
    flags: torch.Tensor,
    armed: torch.Tensor,
    errors: torch.Tensor,
    *,
    layer: int,
    most_looks: int = MOST_LOOKS,
) -> None:
    """Later kernels of the stream run once `layer` has landed at all armed places.

    Args:
        flags: [PLACES] int32 on the device, written by the copier: base + layers landed.
        armed: [ARMED_WORDS] int32 on the device, see there; giving up is written into it.
        errors: [turns] int32 in page-locked host memory: 1 at the step's turn if `layer` has not
            landed at a place after `most_looks` reads. The host may read it once an event recorded
            behind this kernel has happened.
    """
    assert flags.shape == (PLACES,) and flags.is_contiguous()
    assert armed.shape == (ARMED_WORDS,) and armed.is_contiguous()
    assert flags.dtype == armed.dtype == errors.dtype == torch.int32
    assert layer >= 0 and 0 <= most_looks < 2**31 - 1
    _wait[(1,)](
        flags,
        armed,
        errors,
        layer,
        most_looks,
        PLACES=PLACES,
        FENCE=not INTERPRETED,
        num_warps=1,
        **pdl_options(flags.device),
    )


def wait_for_loads_reference(
    flags: torch.Tensor,
    armed: torch.Tensor,
    errors: torch.Tensor,
    *,
    layer: int,
    most_looks: int = MOST_LOOKS,
) -> None:
    """`wait_for_loads` in plain torch, reading from the host."""
    wanted = armed[:PLACES] + (layer + 1)
    is_armed = armed[PLACES : 2 * PLACES] != 0
    looks = most_looks if armed[GAVE_UP] else 0
    while bool((is_armed & (flags - wanted < 0)).any()):
        if looks == most_looks:
            armed[GAVE_UP] = 1
            errors[int(armed[TURN])] = 1
            return
        looks += 1
