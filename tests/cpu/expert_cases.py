"""Small mixtures in host memory, and what a request to them must give, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import (
    NO_PART,
    ON_DEVICE,
    WHOLES,
    ExpertMailbox,
    LinkPart,
    Order,
    inputs_of,
    open_mailbox,
    order_for,
    ordered_inputs,
)
from hetero_llm.bridge.host_experts import HostExperts, HostKind, HostLayer, HostMatrices
from hetero_llm.models.config import ClampedSwish
from hetero_llm.models.layers import GatedActivation
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize

PLAIN: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Weights of one form.

    Attributes:
        group: columns that share a scale; 0: all of a row.
        zeros: "", "points" or "offsets".
    """

    name: HostKind
    group: int = 0
    scale_rows: int = 1
    scale_dtype: torch.dtype = torch.float32
    zeros: str = ""
    row_scale: bool = False


KINDS = {
    "float32": Kind("float32"),
    "bf16": Kind("bfloat16"),
    "half": Kind("float16"),
    "int8": Kind("int8"),
    "int8_groups": Kind("int8", 64, scale_dtype=torch.bfloat16),
    "fp8": Kind("fp8", row_scale=True),
    "fp8_blocks": Kind("fp8", 128, 128),
    "int4_32": Kind("int4", 32, scale_dtype=torch.float16),
    "int4_32_points": Kind("int4", 32, scale_dtype=torch.float16, zeros="points"),
    "int4_64": Kind("int4", 64, scale_dtype=torch.bfloat16),
    "int4_128_points": Kind("int4", 128, scale_dtype=torch.bfloat16, zeros="points"),
    "int4_128_offsets": Kind("int4", 128, scale_dtype=torch.float16, zeros="offsets"),
    "fp4": Kind("fp4", 32, scale_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Mixture:
    """`gate_up`, `down`: [layers, experts, rows, columns] float32, what the host's stand for."""

    host: HostExperts
    gate_up: Tensor
    down: Tensor


def make_mixture(
    kind: Kind,
    *,
    layers: int = 1,
    experts: int = 4,
    hidden: int = 64,
    inner: int = 32,
    gate: str | ClampedSwish = "silu",
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> Mixture:
    """Random weights whose outputs are about 1 for inputs of about 1."""
    generator = torch.Generator().manual_seed(seed)
    found, dense = [], []
    for _ in range(layers):
        parts = [
            _matrices(kind, experts, rows, columns, bias, generator)
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
        ]
        found.append(HostLayer(parts[0][0], parts[1][0]))
        dense.append((parts[0][1], parts[1][1]))
    swish = isinstance(gate, ClampedSwish)
    host = HostExperts(
        tuple(found),
        "clamped" if isinstance(gate, ClampedSwish) else gate,
        gate.alpha if swish else 0.0,  # type: ignore[union-attr]
        gate.limit if swish else 0.0,  # type: ignore[union-attr]
    )
    return Mixture(host, torch.stack([d[0] for d in dense]), torch.stack([d[1] for d in dense]))


def _matrices(
    kind: Kind, experts: int, rows: int, columns: int, bias: torch.dtype | None,
    generator: torch.Generator,
) -> tuple[HostMatrices, Tensor]:  # fmt: skip
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    own_bias = None if bias is None else (0.3 * random(experts, rows)).to(bias)
    if kind.name in PLAIN:
        data = (random(experts, rows, columns) * columns**-0.5).to(PLAIN[kind.name])
        return HostMatrices(kind.name, data, bias=own_bias), data.float()
    group = kind.group or columns
    groups = -(-columns // group)
    scale_shape = (experts, -(-rows // kind.scale_rows), groups)
    largest = {"int8": 73.0, "fp8": 128.0, "int4": 4.6, "fp4": 2.5}[kind.name]  # about their rms
    spread = 0.5 + torch.rand(scale_shape, generator=generator)
    scale = (spread * columns**-0.5 / largest).to(kind.scale_dtype)
    codes = torch.randint(0, 256, (experts, rows, columns), generator=generator)
    data = codes.to(torch.uint8)
    zero = offset = None
    if kind.name == "int8":
        data = data.view(torch.int8)
    elif kind.name == "fp8":
        data = torch.where(data & 127 == 127, data - 1, data)  # not NaN
        data = torch.where(codes % 7 == 0, data & 0x87, data)  # numbers below the first exponent
        data = data.view(torch.float8_e4m3fn)
    else:
        data = data[..., : columns // 2].contiguous()
    if kind.zeros == "points":
        zero = torch.randint(0, 16, (experts, rows, groups), generator=generator).to(torch.uint8)
    elif kind.zeros == "offsets":
        offset = (-8 * scale.float() * (0.5 + torch.rand(scale_shape, generator=generator))).to(
            kind.scale_dtype
        )
    row_scale = 0.5 + torch.rand(experts, rows, generator=generator) if kind.row_scale else None
    matrices = HostMatrices(
        kind.name, data, scale, group, kind.scale_rows, zero, offset, row_scale, own_bias
    )
    fields: dict[str, Any] = {
        name: tensor for name, tensor in matrices.tensors() if name not in ("data", "bias", "scale")
    }
    dense = [
        dequantize(
            QuantizedMatrix(
                kind.name,  # type: ignore[arg-type]
                data[e], scale[e], group, kind.scale_rows,
                **{name: tensor[e] for name, tensor in fields.items()},
            ),
            torch.float32,
        )
        for e in range(experts)
    ]  # fmt: skip
    return matrices, torch.stack(dense)


def expected(
    mixture: Mixture, mailbox: ExpertMailbox, layer: int, tokens: int, *, part: LinkPart = NO_PART
) -> Tensor:
    """[tokens, hidden] float32: y of a request; rows of tokens that ask for nothing are 0.

    Args:
        part: that the request leaves out.
    """
    host, dtype = mixture.host, mailbox.x.dtype
    gate: str | ClampedSwish = host.activation
    if gate == "clamped":
        gate = ClampedSwish(host.alpha, host.limit)
    activation = GatedActivation(gate)
    own = host.layers[layer]
    kept = host.inner - part.rows
    asked = mailbox.ids[:tokens]
    different = asked[asked != ON_DEVICE].unique().tolist()
    teams = different[: len(different) - len(different) * part.whole // WHOLES]
    y = torch.zeros(tokens, host.hidden)
    for expert in teams:
        chosen, places = (asked == expert).nonzero(as_tuple=True)
        first = inputs_of(mailbox)[chosen].float() @ mixture.gate_up[layer, expert].T
        if own.gate_up.bias is not None:
            first = first + own.gate_up.bias[expert].float()
        inner = activation.plain(first)
        inner[:, kept:] = 0
        if dtype == torch.bfloat16:
            inner = inner.bfloat16().float()
        second = inner @ mixture.down[layer, expert].T
        if own.down.bias is not None:
            second = second + own.down.bias[expert].float()
        y.index_add_(0, chosen, mailbox.weights[chosen, places, None] * second)
    return y


def fill(
    mailbox: ExpertMailbox, tokens: int, experts: int, *, seed: int, on_device: float = 0.3
) -> None:
    """Random inputs, weights and experts, all different for a token, as a device writes them.

    Args:
        on_device: share of the choices that the device keeps. y becomes NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    k = mailbox.ids.shape[1]
    x = torch.randn(tokens, mailbox.y.shape[1], generator=generator)
    mailbox.x[:tokens] = ordered_inputs(mailbox, x.to(mailbox.x.dtype))
    mailbox.weights[:tokens] = torch.rand(tokens, k, generator=generator)
    for token in range(tokens):
        mailbox.ids[token] = torch.randperm(experts, generator=generator)[:k].int()
    kept = torch.rand(tokens, k, generator=generator) < on_device
    mailbox.ids[:tokens][kept] = ON_DEVICE
    mailbox.sums.fill_(float("nan"))


def mailbox_for(
    mixture: Mixture,
    tokens: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    order: Order | None = None,
) -> ExpertMailbox:
    """Not page-locked; its inputs in the engine's order where no other one is named."""
    order = order or order_for(mixture.host.layers[0].gate_up.kind, dtype)
    return open_mailbox(tokens, mixture.host.hidden, k, dtype, pin=False, order=order)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """More of torch's threads would take the team's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
