"""Activations: plain, and activation(gate) * up of a fused projection's output.

Wrappers `activation` and `gated_activation`, references `*_reference`; timed by
`bench.kernels.elementwise`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import pdl_options, strided_grid, wait_and_release
from hetero_llm.models.config import ClampedSwish, Gate
from hetero_llm.models.layers import Activation, GatedActivation

KINDS = {
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""By the names of config.json: the names that `activate` knows."""
CLAMPED = "clamped"
"""What kernels with gates call a `ClampedSwish`, whose numbers they have beside it."""
_ALL_KINDS = KINDS | {"sigmoid": "sigmoid", "tanh": "tanh"}
"""By the names of `layers.Activation`."""

_TILE = 1024
_NUM_WARPS = 4
_PROGRAMS_PER_SM = 16


@triton.jit
def activate(x, NAME: tl.constexpr):
    """A function of `_ALL_KINDS`, in float32."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "relu":
        return tl.where(x < 0.0, 0.0, x)  # keeps NaN
    elif NAME == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    elif NAME == "tanh":
        # 1 - e^-2|x| cancels near zero; there five terms of the series are good to 1e-8.
        e = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - e) / (1.0 + e)
        y = x * x
        near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
        return tl.where(y < 0.0625, near, tl.where(x < 0.0, -far, far))
    else:
        # 0.5 * (1 + tanh(y)) = sigmoid(2 * y), which does not cancel for negative y.
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit
def clamped_swish(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """See `layers.ClampedSwish`, in float32; keeps NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))


class GateForm(NamedTuple):
    """A gate as one constant of kernels (as of `fused_lora.AdapterShape`).

    Attributes:
        name: of `activate`, or `CLAMPED`; "": there is no gate.
        alpha, limit: of `clamped_swish`.
    """

    name: str
    alpha: float = 0.0
    limit: float = 0.0


def gate_form(gate: Gate) -> GateForm:
    """That of a gate; of "" that of a product without one."""
    if isinstance(gate, ClampedSwish):
        return GateForm(CLAMPED, gate.alpha, gate.limit)
    return GateForm(KINDS[gate] if gate else "")


@triton.jit(do_not_specialize=["num_rows"])
def _activation(
    out_ptr, x_ptr, num_rows, row_stride,
    INNER: tl.constexpr, TILE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_release(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tiles: tl.constexpr = (INNER + TILE - 1) // TILE
    for index in tl.range(tl.program_id(0), num_rows * tiles, tl.num_programs(0), num_stages=1):
        row = tl.cast(index // tiles, tl.int64)
        columns = (index % tiles) * TILE + tl.arange(0, TILE)
        inside = columns < INNER
        gates = x_ptr + row * row_stride + columns
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        if NAME == "clamped":
            up = tl.load(gates + INNER, mask=inside, other=0.0).to(tl.float32)
            out = clamped_swish(gate, up, ALPHA, LIMIT).to(dtype)
        else:
            out = activate(gate, NAME).to(dtype)  # rounded before the product, as torch does
            if GATED:
                up = tl.load(gates + INNER, mask=inside, other=0.0).to(tl.float32)
                out = (out.to(tl.float32) * up).to(dtype)
        tl.store(out_ptr + row * INNER + columns, out, mask=inside)


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """`layers.Activation(name)` of every element, computed in float32 and rounded once.

    Args:
        x: [T, inner]; float32, bfloat16 or float16; rows may be strided.
        name: Of `layers.Activation`.

    Returns:
        [T, inner], new and contiguous.
    """
    assert name in _ALL_KINDS, name
    return _launch(x, GateForm(_ALL_KINDS[name]), x.shape[1], gated=False)


def gated_activation(gate_up: torch.Tensor, name: Gate) -> torch.Tensor:
    """activation(gate) * up, rounded where `GatedActivation.plain` rounds.

    Args:
        gate_up: [T, 2 * inner], gate first; float32, bfloat16 or float16; rows may be strided.
        name: One of `layers.Activation` that config.json can name, or a `ClampedSwish`.

    Returns:
        [T, inner], contiguous.
    """
    assert serves_gate(name) and gate_up.shape[1] % 2 == 0, (name, gate_up.shape)
    return _launch(gate_up, gate_form(name), gate_up.shape[1] // 2, gated=True)


def serves_gate(gate: Gate) -> bool:
    """Whether kernels with gates can compute it."""
    return isinstance(gate, ClampedSwish) or gate in KINDS


def _launch(x: torch.Tensor, form: GateForm, inner: int, *, gated: bool) -> torch.Tensor:
    """[T, inner] from the rows of x."""
    num_rows = len(x)
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    out = torch.empty(num_rows, inner, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = num_rows * triton.cdiv(inner, _TILE)
    _activation[strided_grid(tiles, _PROGRAMS_PER_SM, x.device)](
        out,
        x,
        num_rows,
        x.stride(0),
        INNER=inner,
        TILE=_TILE,
        GATED=gated,
        NAME=form.name,
        ALPHA=form.alpha,
        LIMIT=form.limit,
        num_warps=_NUM_WARPS,
        **pdl_options(x.device),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up: see `gated_activation`."""
    return gated_activation(gate_up, "silu")


def gated_activation_reference(gate_up: torch.Tensor, name: Gate) -> torch.Tensor:
    """`gated_activation` as the torch path computes it."""
    return GatedActivation(name).plain(gate_up)


def activation_reference(x: torch.Tensor, name: str) -> torch.Tensor:
    """`activation` as the torch path computes it."""
    return Activation(name)(x)
