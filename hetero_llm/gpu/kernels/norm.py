"""Residual add and RMS norm in one kernel, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import let_next_start, pdl_options, wait_for_inputs
from hetero_llm.models.layers import add_rms_norm as add_rms_norm_reference

__all__ = ["MAX_NORM_SIZE", "add_rms_norm", "add_rms_norm_reference"]

MAX_NORM_SIZE = 16384
"""Longest row: a program holds its whole row in registers."""


@triton.jit
def _add_rms_norm(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start(PDL)

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = (total + residual).to(dtype)
        tl.store(residual_ptr + place, rounded, mask=inside)
        total = rounded.to(tl.float32)
    mean_square = tl.sum(total * total, 0) / SIZE
    # In low precision the norm is rounded before it meets the weight; in float32 this is no-op.
    norm = (total * tl.rsqrt(mean_square + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + place, (norm * weight).to(dtype), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual`, and that sum; an `AddNorm` of `models/layers.py`.

    Computed in float32 and rounded where the torch path rounds: the sum, the norm, the product.

    Args:
        x: [T, size], contiguous; float32, bfloat16 or float16; size at most `MAX_NORM_SIZE`.
        residual: As x, overwritten with the sum; None: the sum is x itself.
        weight: [size], dtype of x.
        eps: Added to the mean of squares.

    Returns:
        The norm (new) and the sum (`residual`, or x), both [T, size].
    """
    size = x.shape[-1]
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    assert weight.shape == (size,) and weight.dtype == x.dtype and size <= MAX_NORM_SIZE
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype
        assert residual.is_contiguous(), residual.stride()
    total = x if residual is None else residual
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out, total
    padded = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        out,
        x,
        total,
        weight,
        eps,
        SIZE=size,
        PADDED=padded,
        HAS_RESIDUAL=residual is not None,
        # 16 elements a thread: two 16-byte loads of each operand in flight.
        num_warps=min(max(padded // 512, 1), 32),
        **pdl_options(x.device),
    )
    return out, total
