"""Joins attention over two parts of a context by their log-sum-exp.

Wrapper `join_parts`, reference `join_parts_reference`; timed by `bench.kernels.step_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import pdl_options, wait_and_release

_TILE = 16


@triton.jit(do_not_specialize=["num_lines"])
def _join(
    first_ptr, second_ptr, first_weight_ptr, second_weight_ptr, num_lines,
    row_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED)
    exists = line < num_lines
    mask = exists[:, None] & (dims < DIM)[None, :]
    place = line[:, None] * DIM + dims[None, :]
    weight = line // HEADS * row_stride + line % HEADS * head_stride
    wait_and_release(PDL)
    first_weight = tl.load(first_weight_ptr + weight, mask=exists, other=0.0)
    second_weight = tl.load(second_weight_ptr + weight, mask=exists, other=0.0)
    first = tl.load(first_ptr + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + place, mask=mask, other=0.0).to(tl.float32)
    # A part's share of the softmax is the sigmoid of the difference of the logarithms.
    share = tl.sigmoid(second_weight - first_weight)[:, None]
    joined = first + (second - first) * share
    tl.store(first_ptr + place, joined.to(first_ptr.dtype.element_ty), mask=mask)


def join_parts(
    first: torch.Tensor,
    second: torch.Tensor,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
) -> torch.Tensor:
    """Attention over two disjoint sets of keys, joined into `first`.

    Args:
        first, second: [T, H, D], contiguous, of one type.
        first_weight, second_weight: [T, H] float32 natural log-sum-exp of the scores, equal
            strides.

    Returns:
        `first`.
    """
    rows, heads, dim = first.shape
    assert first.is_contiguous() and second.is_contiguous() and first.shape == second.shape
    assert first.dtype == second.dtype and first_weight.dtype == torch.float32
    assert first_weight.shape == (rows, heads) == second_weight.shape
    assert first_weight.stride() == second_weight.stride()
    _join[(triton.cdiv(rows * heads, _TILE),)](
        first,
        second,
        first_weight,
        second_weight,
        rows * heads,
        *first_weight.stride(),
        HEADS=heads,
        DIM=dim,
        PADDED=triton.next_power_of_2(dim),
        TILE=_TILE,
        num_warps=4,
        **pdl_options(first.device),
    )
    return first


def join_parts_reference(
    first: torch.Tensor,
    second: torch.Tensor,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
) -> torch.Tensor:
    """`join_parts` in plain torch, into a new tensor."""
    share = torch.sigmoid(second_weight - first_weight).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), share).to(first.dtype)
