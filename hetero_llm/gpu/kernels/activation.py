"""Gated activations: activation(gate) * up of a fused projection's output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import (
    let_next_start,
    num_multiprocessors,
    pdl_options,
    wait_for_inputs,
)
from hetero_llm.models.layers import GatedActivation

_KINDS = {
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What `_activate` calls the functions that config.json can name."""

_TILE = 1024
_NUM_WARPS = 4
_PROGRAMS_PER_SM = 16


@triton.jit
def _activate(x, NAME: tl.constexpr):
    """A function of `_KINDS`, in float32."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "relu":
        return tl.where(x < 0.0, 0.0, x)  # keeps NaN
    elif NAME == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(y)) = sigmoid(2 * y), which does not cancel for negative y.
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_activation(
    out_ptr, gate_up_ptr, num_rows, row_stride,
    INNER: tl.constexpr, TILE: tl.constexpr, NAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    tiles: tl.constexpr = (INNER + TILE - 1) // TILE
    for index in tl.range(tl.program_id(0), num_rows * tiles, tl.num_programs(0), num_stages=1):
        row = tl.cast(index // tiles, tl.int64)
        columns = (index % tiles) * TILE + tl.arange(0, TILE)
        inside = columns < INNER
        gates = gate_up_ptr + row * row_stride + columns
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + INNER, mask=inside, other=0.0).to(tl.float32)
        active = _activate(gate, NAME).to(dtype).to(tl.float32)  # rounded, as the torch path does
        tl.store(out_ptr + row * INNER + columns, (active * up).to(dtype), mask=inside)


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """activation(gate) * up, rounded where `GatedActivation.plain` rounds.

    Args:
        gate_up: [T, 2 * inner], gate first; float32, bfloat16 or float16; rows may be strided.
        name: One of `layers.Activation` that config.json can name.

    Returns:
        [T, inner], contiguous.
    """
    assert name in _KINDS, name
    num_rows, width = gate_up.shape
    assert gate_up.stride(1) == 1 and width % 2 == 0, (gate_up.shape, gate_up.stride())
    inner = width // 2
    out = torch.empty(num_rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    tiles = num_rows * triton.cdiv(inner, _TILE)
    grid = (min(tiles, _PROGRAMS_PER_SM * num_multiprocessors(gate_up.device)),)
    _gated_activation[grid](
        out,
        gate_up,
        num_rows,
        gate_up.stride(0),
        INNER=inner,
        TILE=_TILE,
        NAME=_KINDS[name],
        num_warps=_NUM_WARPS,
        **pdl_options(gate_up.device),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up: see `gated_activation`."""
    return gated_activation(gate_up, "silu")


def gated_activation_reference(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """The same as the torch path computes it."""
    return GatedActivation(name).plain(gate_up)
