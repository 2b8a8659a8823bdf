"""Weights on their way while small kernels run: norms, gates and rotary embedding use a few
multiprocessors and no memory bandwidth, so programs beside theirs ask for the first part of the
next product's weights in L2 (50 MB on Hopper)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import num_multiprocessors, pdl_options

MAX_AHEAD_ROWS = 64
"""With more rows the small kernels fill the chip themselves."""


@triton.jit
def prefetch_share(weight, share, piece, THREADS: tl.constexpr):
    """Asks for THREADS pieces of `piece` bytes, from byte share * THREADS * piece on; one request
    a thread. Weights may be asked for before `wait_for_inputs`."""
    lane = (share * THREADS + tl.arange(0, THREADS)).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [weight.to(tl.int64) + lane * piece, piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def ahead_share(
    weight: torch.Tensor | None, num_rows: int, num_warps: int, most_bytes: int
) -> tuple[int, int]:
    """Programs to add to a kernel's grid, and the bytes each of their threads asks for.

    Args:
        weight: of the next product; None: nothing to ask for.
        num_rows: rows of the step.
        num_warps: of the kernel.
        most_bytes: how much of the weight is worth asking for.
    """
    if weight is None or num_rows > MAX_AHEAD_ROWS or not pdl_options(weight.device)["PDL"]:
        return 0, 0
    programs = num_multiprocessors(weight.device)
    threads = programs * num_warps * 32
    piece = min(most_bytes, weight.nbytes) // threads // 16 * 16
    return (programs, piece) if piece else (0, 0)
